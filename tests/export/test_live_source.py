"""The page of the documents is what its sources make: `make live` writes it again."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "live"))
import build  # noqa: E402

PAGE = (DOCS / "live.html").read_text("utf-8")


def test_page_is_its_template_filled():
    parts = re.split("%[A-Z]+%", (DOCS / "live" / "page.html").read_text("utf-8"))
    assert len(parts) == 5
    pattern = r"[0-9A-Za-z+/=]+".join(map(re.escape, parts))
    assert re.fullmatch(pattern, PAGE), "docs/live/page.html changed: make live"


def test_page_is_of_these_sources():
    assert build.sources() in PAGE, "docs/live/ changed: make live"


def test_page_is_small_and_asks_for_nothing():
    assert len(PAGE.encode()) < 300_000
    assert "http" not in PAGE
