"""The Python in the documents runs: the blocks of a file in order, in one namespace."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
BLOCK = re.compile(
    r"^(?P<skip><!-- no-run -->\n\s*)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
OUTPUT = re.compile(r"\s*<!-- output -->\n```text\n(?P<shown>.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
PLACE = re.compile(r"[\w./-]+:\d+(?= \()")  # a line of the page, or of net.py as it is shown
RULE = re.compile(r"^=+$", re.MULTILINE)


def blocks(text: str) -> list[tuple[str, str | None]]:
    """Code to run, and what it prints where the document shows that.

    Lines before the code are blank, so that a traceback names the document's line.
    """
    found = [match for match in BLOCK.finditer(text) if not match["skip"]]
    printed = [OUTPUT.match(text, match.end()) for match in found]
    return [
        ("\n" * text.count("\n", 0, match.start("code")) + match["code"], after and after["shown"])
        for match, after in zip(found, printed, strict=True)
    ]


def assert_shown(printed: str, shown: str) -> None:
    """The same words; numbers with a point to a tenth, since rounding differs between machines.

    What is shown may leave out words by "...", then numbers are not compared.
    """
    said, words = (
        [*NUMBER.sub("#", RULE.sub("", PLACE.sub("@", t))).split()] for t in (printed, shown)
    )
    if "..." in shown:
        pattern = " ".join(re.escape(word).replace(re.escape("..."), ".*") for word in words)
        assert re.fullmatch(pattern, " ".join(said)), " ".join(said)
        return
    assert said == words
    values = [[float(n) for n in NUMBER.findall(text)] for text in (printed, shown)]
    assert values[0] == pytest.approx(values[1], rel=0.1)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_runs(path, alone, capsys):
    namespace = {"__name__": path.stem}
    text = path.read_text("utf-8")
    if "import spyx" in text and version("spyx").startswith("0."):
        pytest.skip("Spyx 1 needs a newer JAX")
    if "import torch" in text:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    if "net.export(" in text:
        pytest.importorskip("flatbuffers", reason="pip install 'braintrace-online[export]'")
    for code, shown in blocks(text):
        capsys.readouterr()
        exec(compile(code, path, "exec"), namespace)
        if shown is not None:
            assert_shown(capsys.readouterr().out, shown)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_document_has_something_to_run(name):
    assert blocks((ROOT / name).read_text("utf-8"))


def test_blocks_are_found_in_order_and_keep_their_lines():
    text = "# t\n\n```python\na = 1\n```\n\n```\nnot python\n```\n\n```python\nb = a\n```\n"
    (first, _), (second, _) = blocks(text)
    assert first == "\n\n\na = 1\n"
    assert second.strip() == "b = a" and second.count("\n") == text.count("\n") - 1


def test_shown_output_is_compared():
    text = "```python\nprint(1.04)\n```\n\n<!-- output -->\n```text\n1.0\n```\n"
    ((_, shown),) = blocks(text)
    assert_shown("1.04\n", shown)
    with pytest.raises(AssertionError):
        assert_shown("1.4\n", shown)
    with pytest.raises(AssertionError):
        assert_shown("loss 1.0\n", shown)
    assert_shown("====\nw: at a/page.md:7 (f) stored 3.1\n", "w: ... (f) stored\n  3.1")
    assert_shown("w: at a/page.md:7 (f)\n", "w: at net.py:12 (f)")
    with pytest.raises(AssertionError):
        assert_shown("w: at a/page.md:7 (g) kept\n", "w: ... (f) stored")


def test_marked_block_is_skipped():
    text = "<!-- no-run -->\n```python\n1 / 0\n```\n\n```python\nc = 1\n```\n"
    assert [code.strip() for code, _ in blocks(text)] == ["c = 1"]
