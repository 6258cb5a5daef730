"""`net.export`: the same update, run by JAX in a process that has no braintrace."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest
from networks import NETWORKS, loss, stream

import braintrace
from braintrace._errors import MissingExtra

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "export.md").read_text("utf-8")
(OF_PAGE,) = re.findall(r"^```python\n(import json\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ALONE = f"""
import sys
sys.modules["braintrace"] = None  # an import of it fails
from pathlib import Path
import jax
import numpy as np
jax.config.update("jax_enable_x64", True)
folder, x, target = Path(sys.argv[1]), np.ones(3), np.ones(2)
{OF_PAGE}
told = np.load(folder / "told.npz")
kept, losses = [start[a["name"]] for a in manifest["arguments"] if a["name"] in start], []
for x, target in zip(told["x"], told["target"]):
    out, error, *kept = update(*kept, x, target)
    losses.append(float(error))
print(json.dumps(losses))
"""


pytest.importorskip("flatbuffers", reason="pip install 'braintrace-online[export]'")


def exported(path, **options):
    step, params, state = NETWORKS["mingru"](np.float64)
    xs, ys = stream(np.float64, "mingru", 20)
    net, optimizer = braintrace.online(step, "d_rtrl"), optax.adam(1e-2)
    carry = net.init(params, state, xs[0])
    how = dict(loss=loss, optimizer=optimizer, path=path, **options)
    done = net.export(params, carry, xs[0], ys[0], **how)
    train = net.train(loss, optimizer)
    *_, losses = train(params, optimizer.init(params), carry, xs, ys)
    return done, xs, ys, losses


def test_program_runs_without_the_library(tmp_path):
    done, xs, ys, losses = exported(tmp_path)
    np.savez(tmp_path / "told.npz", x=xs, target=ys)
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert np.abs(np.array(json.loads(ran.stdout)) - losses).max() < 1e-12
    assert done.nbytes == (tmp_path / "update.stablehlo").stat().st_size
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    told = {a["name"]: (a["what"], a["shape"]) for a in manifest["arguments"]}
    assert told["x"] == ("inputs", [3]) and told["w"] == ("parameters", [3, 6])
    assert [r["name"] for r in manifest["results"][:2]] == ["out", "loss"]


def test_program_for_other_machines(tmp_path):
    done, *_ = exported(tmp_path, platforms=("cpu", "cuda"))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["platforms"] == ["cpu", "cuda"] == list(done.platforms)


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for name in [m for m in sys.modules if m.startswith("jax._src.export.serial")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtra, match=r"flatbuffers.*pip install"):
        exported(tmp_path)


def test_unknown_platform_is_refused(tmp_path):
    with pytest.raises(ValueError, match="platforms=\\['abacus'\\]"):
        exported(tmp_path, platforms=["abacus"])
