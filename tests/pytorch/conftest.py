"""The folder on the path: tests are no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `torch_cells`, `operator_samples`
