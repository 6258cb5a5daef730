"""For `import models`, those of tests/truth: tests are no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "truth"))
