"""A recognised step as a model of operators, which the oracle reads."""

import brainstate
import jax

from braintrace.program import evaluate


class Recognised(brainstate.nn.Module):
    """The program of an analysed step: parameters and states by number."""

    def __init__(self, graph, consts, params, hidden, others=()):
        super().__init__()
        self.step, self.consts = graph.step, consts
        self.w = [brainstate.ParamState(a) for a in params]
        self.h = [brainstate.HiddenState(a) for a in hidden]
        self.s = [brainstate.ShortTermState(a) for a in others]

    def update(self, *inputs):
        step = self.step
        values = [*inputs, *[None] * (len(step.program.inputs) - len(inputs))]
        written = ((step.hidden, self.h), (step.others, self.s))
        for leaves, states in ((step.params, self.w), *written):
            for leaf, state in zip(leaves, states, strict=True):
                values[leaf.position] = state.value
        outs = evaluate(step.program, self.consts, values)
        for leaves, states in written:
            for leaf, state in zip(leaves, states, strict=True):
                state.value = outs[leaf.output]
        return outs[: step.n_outs]


def of_online(net, params, state):
    """The model of the step that was analysed last, with these arrays."""
    plan = net._last
    numbers = plan.signature.params, plan.signature.state
    (trained, _), (hidden, others) = (
        [[jax.tree.leaves(tree)[i] for i in part] for part in (layout.trained, layout.arrays)]
        for layout, tree in zip(numbers, (params, state), strict=True)
    )
    return Recognised(plan.graph, plan.consts, trained, hidden, others)
