"""What a comparison is asked for, and what it finds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .tasks import Task


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and how long.

    Attributes:
        name: of the task.
        tests: held-out sequences, at most.
        points: how often the held-out score is taken during training.
        rounds: how often each gradient is timed.
    """

    name: str
    task: Task
    cell: str
    units: int
    batch: int
    updates: int
    rate: float
    seeds: int
    tests: int = 512
    points: int = 20
    rounds: int = 9


@dataclass(frozen=True, slots=True)
class Agreement:
    """Cosine and relative error to BPTT: of the cell's weights, and of all."""

    cosine: float
    error: float
    cosine_all: float
    error_all: float


@dataclass(frozen=True, slots=True)
class Seed:
    """One training run: scores at the updates `at`, losses of every update."""

    seed: int
    score: float
    at: list[int]
    scores: list[float]
    losses: list[float]
    initial: Agreement
    trained: Agreement


@dataclass(slots=True)
class Row:
    """What is known of a rule so far."""

    label: str
    rule: str
    options: dict[str, Any]
    window: int | None = None
    block: int | None = None
    refused: str | None = None
    working_bytes: float = math.nan
    kept_bytes: int = 0
    milliseconds: float = math.nan  # of a gradient of the whole sequence
    seeds: list[Seed] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """The rows of a task; `finished` unless it was interrupted."""

    plan: Plan
    rows: list[Row]
    finished: bool = False
