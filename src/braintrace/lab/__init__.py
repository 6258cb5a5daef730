"""The laboratory: the command line, comparisons, tasks, recordings, pictures, NIR files.

It uses the library; no part of the library imports it.
"""
