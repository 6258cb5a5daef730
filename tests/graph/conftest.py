"""Fixtures of the tests of the analyses."""

import pytest

import braintrace.graph._graph as analysis


@pytest.fixture
def whole_batch(monkeypatch):
    """Analyse every element, not a few samples."""
    monkeypatch.setattr(analysis, "thin", lambda tangent: None)
