"""Names of tasks, cells and rules, and what tasks are trained with: help imports nothing more."""

from __future__ import annotations

from dataclasses import dataclass

from .._table import aligned


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a task is trained with unless options say otherwise; `quick` is a short length."""

    about: str
    cell: str
    length: int
    quick: int
    units: int
    batch: int
    updates: int
    lr: float


# Lengths are multiples of a block: a remainder would need working memory of its own. With these
# sizes the traces of D_RTRL take less memory than BPTT does, and truncated BPTT of equal memory has
# windows shorter than the task needs (except `digits`, whose sequences have eight steps).
TASKS = {
    "copy": Defaults("repeat symbols after a pause", "gru", 40, 16, 32, 32, 3000, 1e-2),
    "adding": Defaults("sum of two marked numbers", "mingru", 96, 16, 32, 32, 1500, 1e-2),
    "match": Defaults("delayed match to sample, spikes", "alif", 144, 24, 32, 32, 1000, 3e-3),
    "evidence": Defaults("majority of cues, spikes", "alif", 160, 24, 32, 32, 800, 5e-3),
    "mackey_glass": Defaults("chaotic time series", "gru", 200, 16, 32, 32, 800, 3e-3),
    "digits": Defaults("real handwritten digits by rows", "gru", 8, 8, 32, 32, 2000, 3e-3),
    "text": Defaults("next character of English text", "gru", 96, 16, 64, 32, 1500, 5e-3),
    "pixels": Defaults("real handwritten digits by pixels", "gru", 64, 64, 32, 32, 2000, 3e-3),
    "vowels": Defaults("speech: who of nine speakers", "gru", 32, 16, 32, 32, 1000, 3e-3),
    "motions": Defaults("wearable sensors: which activity", "gru", 96, 16, 32, 16, 500, 3e-3),
    "shd": Defaults("spoken digits as spikes (--data)", "alif", 96, 16, 64, 32, 2000, 3e-3),
    # Streams: an update at every step, so that there are as many as steps.
    "adapt_sine": Defaults("frequency shift, a stream", "gru", 4000, 80, 32, 1, 4000, 3e-3),
    "adapt_lorenz": Defaults("parameter shift, a stream", "gru", 4000, 80, 32, 1, 4000, 3e-3),
    "delayed": Defaults("answer 50 steps later, a stream", "gru", 12000, 240, 32, 1, 12000, 3e-3),
    "electricity": Defaults("device readings, a stream", "gru", 2000, 80, 32, 1, 2000, 3e-3),
    # A choice, and a reward later.
    "bandit": Defaults("two arms, the reward later", "alif", 40, 16, 32, 32, 100, 1e-2),
    "t-maze": Defaults("a turn by a cue, the reward later", "alif", 40, 16, 32, 32, 300, 1e-2),
}
STREAMS = ("adapt_sine", "adapt_lorenz", "delayed", "electricity")
REWARDS = ("bandit", "t-maze")
NEED_DATA = ("shd",)  # tasks whose files the user has: --data
CELLS = {
    "gru": "gated recurrent unit",
    "lstm": "long short-term memory",
    "rnn": "plain tanh recurrence: nothing passes from step to step but by weights",
    "leaky": "leaky tanh rate units",
    "mingru": "gates of the input only: element-wise, D_RTRL is exact",
    "lru": "linear recurrence, complex eigenvalues: element-wise, D_RTRL is exact",
    "alif": "spiking, recurrent, adaptive threshold: two states per unit",
    "minlstm": "two gates of the input only: element-wise, D_RTRL is exact",
    "adlif": "spiking, recurrent, adapts below threshold",
    "gif": "spiking, recurrent, currents after a spike",
}
RULES = (
    "bptt", "remat", "tbptt", "rolling", "no_trace", "auto", "d_rtrl", "pp_prop", "eprop", "rflo",
    "ostl_recurrent", "ostl_feedforward", "ottt", "otpe", "osttp", "snap", "rtrl", "three_factor",
    "r_stdp", "reward_eprop", "decolle", "stllr", "tess", "dni", "uoro", "kf_rtrl",
)  # fmt: skip
ALIASES = ("es_d_rtrl", "esd_rtrl")


def task_table() -> str:
    """The tasks and their defaults, for the end of a help text."""
    columns = ("cell", "length", "units", "batch", "updates", "lr")
    head = ["TASK", *(f"--{name}" for name in columns)]
    rows = [[name, *(getattr(task, c) for c in columns)] for name, task in TASKS.items()]
    return "\n  ".join(["tasks, with their default options:", *aligned([head, *rows])])
