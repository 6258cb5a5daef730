"""One job of compare.py: `braintrace compare` with the words after the path of its record.

The record gets the mean loss between two points of a curve instead of the loss of every update.
"""

import sys

import numpy as np

from braintrace import CompareResult
from braintrace.lab.cli import _compare, main

_compare.save_figure = lambda *_: None  # pictures are of whole records
path, *words = sys.argv[1:]
if status := main(["compare", *words]):
    sys.exit(status)
result = CompareResult.load(path)
for seed in (seed for row in result.rows for seed in row.seeds):
    parts = np.array_split(seed.losses, min(result.settings.points, len(seed.losses)))
    seed.losses[:] = [float(part.mean()) for part in parts]
result.save(path)
