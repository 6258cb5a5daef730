"""Agents that learn from one step at a time, with traces for what came before (extra `tasks`)."""

from ._agents import Agent as Agent
from ._agents import AgentState as AgentState
from ._agents import actor_critic as actor_critic
from ._agents import q_lambda as q_lambda
from ._agents import run as run
from ._agents import run_gymnasium as run_gymnasium
from ._core import rotating_units as rotating_units
from ._environments import Environment as Environment
from ._environments import Moment as Moment
from ._environments import cartpole as cartpole
from ._environments import memory_chain as memory_chain
from ._environments import t_maze as t_maze
from ._optimizers import IntentionalState as IntentionalState
from ._optimizers import intentional as intentional
from ._optimizers import lambda_trace as lambda_trace
from ._optimizers import obgd as obgd

# Public names live in `braintrace.rl`: help, pickles and tracebacks say so.
for _name, _value in list(globals().items()):
    if getattr(_value, "__module__", "").startswith(__name__ + "."):
        _value.__module__ = "braintrace.rl"
