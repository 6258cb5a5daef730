"""The gallery: every example has a record of what it printed, and a picture of that."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "gallery.py")
assert spec is not None and spec.loader is not None
gallery = importlib.util.module_from_spec(spec)
sys.modules["gallery"] = gallery  # its records look their module up
spec.loader.exec_module(gallery)


def test_every_example_is_in_the_gallery():
    files = {path.stem for path in gallery.EXAMPLES.glob("*.py")}
    assert files == {*gallery.examples()} == {*gallery.FIGURES}
    assert {path.stem for path in gallery.RECORDS.glob("*.txt")} == files


@pytest.mark.parametrize("name", gallery.examples())
def test_a_picture_is_drawn_from_what_the_example_printed(name, monkeypatch, tmp_path):
    kept = (gallery.PICTURES / f"{name}.svg").read_text("utf-8")
    monkeypatch.setattr(gallery, "PICTURES", tmp_path)
    gallery.draw(name)
    drawn = (tmp_path / f"{name}.svg").read_text("utf-8")
    assert drawn.count("<use") == kept.count("<use") and drawn.count("<text") == kept.count("<text")


def test_pages_of_the_gallery_lead_to_programs():
    page = gallery.page()
    assert page.count("](examples/") == len(gallery.examples())
    program = gallery.page_of("gru_copying")
    assert "class Network" in program and '"""Copying' not in program
