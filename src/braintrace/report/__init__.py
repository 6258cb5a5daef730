"""What the compiler tells people: the report as text, as a tree, and as a drawing in a page."""

from ._picture import uses_of as uses_of
from ._report import CompilationReport as CompilationReport
