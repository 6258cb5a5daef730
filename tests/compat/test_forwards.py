import sys

import brainpy.state
import brainstate
import pytest

import braintrace.nn
from braintrace.compat._forwards import HOMES

MODULES = {"brainpy.state": brainpy.state, "brainstate.nn": brainstate.nn}


def test_every_name_is_found_where_it_lives_now():
    assert len(HOMES) == 8 + 27 + 8 + 12 + 7
    for name, home in HOMES.items():
        with pytest.warns(DeprecationWarning, match=rf"use {home}\.{name}\."):
            assert getattr(braintrace.nn, name) is getattr(MODULES[home], name)


def test_name_can_be_imported():
    with pytest.warns(DeprecationWarning, match=r"braintrace\.nn\.LIF"):
        from braintrace.nn import LIF
    assert LIF is brainpy.state.LIF


def test_unknown_name_is_an_attribute_error(monkeypatch):
    with pytest.raises(AttributeError, match="'Perceptron'"):
        _ = braintrace.nn.Perceptron
    monkeypatch.delattr(brainstate.nn, "SpikeBitwise")
    with pytest.raises(AttributeError, match="'SpikeBitwise', nor has brainstate"):
        _ = braintrace.nn.SpikeBitwise


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "brainpy.state", None)
    with pytest.raises(ImportError, match=r"LIF(.|\n)*pip install brainpy"):
        _ = braintrace.nn.LIF
