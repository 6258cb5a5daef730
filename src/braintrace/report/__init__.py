"""What the compiler tells people: the report as text, as a tree, and as a drawing in a page."""

from ._advice import Advice as Advice
from ._advice import RuleCost as RuleCost
from ._advice import Suggestion as Suggestion
from ._advice import bytes_of as bytes_of
from ._advice import factor as factor
from ._advice import size as size
from ._advice import table as table
from ._picture import uses_of as uses_of
from ._report import CompilationReport as CompilationReport
from ._svg import write as write
