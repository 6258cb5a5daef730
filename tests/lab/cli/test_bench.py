"""The measurement of gradients: what it writes, and what it leaves out."""

import json

import pytest

from braintrace.lab.cli import _bench, main

from .test_demo import hide

ONLINE = "d_rtrl:block=8"
WORDS = ["bench", "--quick", "--rules", "bptt", "remat", ONLINE]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    # 160 KiB: more than the traces need, less than BPTT does for the longer sequence.
    words = ["--lengths", "128", "16", "--memory-limit", str(160 / 2**20), "--out", str(out)]
    assert main([*WORDS, *words]) == 0
    return out, json.loads((out / "bench.json").read_text())


def test_bench_measures_every_rule_and_length(measured):
    out, record = measured
    points = {(p["rule"], p["length"]): p for p in record["points"]}
    assert list(points) == [(r, t) for t in (16, 128) for r in ("bptt", "remat", ONLINE)]
    assert record["finished"] and record["settings"]["rules"][ONLINE]["block"] == 8
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    for key, p in points.items():
        assert p["compiling"] > 0 and p["working"] > 0
        assert p["left_out"] == (key == ("bptt", 128))
        assert len(p["seconds"]) == (0 if p["left_out"] else 2)
        if p["seconds"]:
            assert p["median"] == pytest.approx(sum(p["seconds"]) / 2)


def test_bench_memory_of_bptt_grows_and_that_of_traces_does_not(measured):
    points = {(p["rule"], p["length"]): p["working"] for p in measured[1]["points"]}
    assert points["bptt", 128] > 4 * points["bptt", 16]
    assert points["remat", 128] < 0.5 * points["bptt", 128]
    assert points[ONLINE, 128] < 1.5 * points[ONLINE, 16]


def test_interrupted_bench_without_extras_shows_what_is_there(tmp_path, capsys, monkeypatch):
    hide(monkeypatch, "matplotlib", "tqdm")
    compiled, calls = _bench.Compiled, []

    def interrupted(choice, *rest):
        calls.append(choice.label)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compiled(choice, *rest)

    monkeypatch.setattr(_bench, "Compiled", interrupted)
    assert main([*WORDS, "--lengths", "4", "--out", str(tmp_path)]) == 130
    shown = capsys.readouterr()
    assert "INTERRUPTED" in shown.out and "pip install 'braintrace-online[plot]'" in shown.err
    assert not json.loads((tmp_path / "bench.json").read_text())["finished"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--rules", "magic"], "there is no rule 'magic'"),
        (["--rules", "tbptt"], "tbptt needs a window: tbptt:window=16"),
        (["--lengths", "0"], "'0' is not a positive whole number"),
    ],
)
def test_wrong_bench_exits_with_2(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *words])
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert "usage: braintrace bench" in shown and said in shown


def test_rule_that_cannot_be_measured_is_a_failure(tmp_path, capsys):
    words = ["--rules", "rtrl:memory_limit=10", "--lengths", "4", "--out", str(tmp_path)]
    assert main(["bench", "--quick", *words]) == 1
    assert "rtrl would store" in capsys.readouterr().err
