"""Random numbers of a test, by its name."""

import brainstate
import pytest

from .zoo import Draw


@pytest.fixture
def draw(request):
    brainstate.random.seed(1)
    return Draw(request.node.name)
