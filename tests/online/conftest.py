"""Fixtures: small steps in plain JAX."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `online_cases`; tests are no package

from online_cases import leaky_case, recurrent_case


@pytest.fixture
def recurrent():
    return recurrent_case()


@pytest.fixture
def leaky():
    return leaky_case()
