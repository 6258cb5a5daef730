"""Names that other packages own now: forwarded, with a warning that says where they are."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from warnings import warn

from .._errors import error

_NEURONS = "IF LIF ALIF Expon Alpha DualExpon STP STD"
_ACTIVATIONS = """
    ReLU RReLU Hardtanh ReLU6 Sigmoid Hardsigmoid Tanh SiLU Mish Hardswish ELU CELU SELU GLU GELU
    Hardshrink LeakyReLU LogSigmoid Softplus Softshrink PReLU Softsign Tanhshrink Softmin Softmax
    Softmax2d LogSoftmax
"""
_LAYERS = """
    Dropout Dropout1d Dropout2d Dropout3d Identity SpikeBitwise Flatten Unflatten
    AvgPool1d AvgPool2d AvgPool3d MaxPool1d MaxPool2d MaxPool3d
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d
    AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
    BatchNorm0d BatchNorm1d BatchNorm2d BatchNorm3d LayerNorm RMSNorm GroupNorm
"""

HOMES = {
    **dict.fromkeys(_NEURONS.split(), "brainpy.state"),
    **dict.fromkeys((_ACTIVATIONS + _LAYERS).split(), "brainstate.nn"),
}


def forward(name: str) -> Any:
    """What another package calls by this name; Python asks for names the module does not have."""
    home = HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'braintrace.nn' has no attribute {name!r}")
    try:
        module = import_module(home)
    except ModuleNotFoundError as cause:
        package = home.split(".")[0]
        raise error(ImportError)(
            f"braintrace.nn.{name} is {home}.{name}, and {package} cannot be imported.",
            why=f"{package} is not a requirement of braintrace.",
            do=f"run pip install {package}.",
        ) from cause
    if not hasattr(module, name):
        raise AttributeError(f"module 'braintrace.nn' has no attribute {name!r}, nor has {home}")
    text = f"braintrace.nn.{name} is deprecated; use {home}.{name}."
    warn(text, DeprecationWarning, stacklevel=3)  # at the line that asks for it
    return getattr(module, name)
