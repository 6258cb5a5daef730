"""The learning rules as docs/rules.md defines them, evaluated with dense Jacobians: for tests.

What the tests of learners compare with. It is written from the definitions and shares no trace,
slot or influence map with the library: it imports no rule, engine or learner, only the reading of
programs (`program`, `ops`), one rewriting of the step (`graph._fold`) and the checks of
`braintrace.verify`; `test_layers.py` holds it to that. It is slow, for tiny models in float64.

From a step function to a gradient:

    _unroll      control flow unrolled               _kinds, _marks   which element reads which
    _operators   the operators of a step             _structure       what a rule keeps and cuts
    _derivatives every derivative of a step          _dense           those of a sequence
    _traces, _filters, _signals, _rules              the rules on these matrices
    _options, _reference                             by a rule's public name and options
"""

from ._dense import Dense as Dense
from ._dense import dense as dense
from ._derivatives import run_step as run_step
from ._estimates import kf_step as kf_step
from ._estimates import uoro_step as uoro_step
from ._options import definition as definition
from ._options import rule_name as rule_name
from ._reference import compare_to_rule as compare_to_rule
from ._reference import reference_grad as reference_grad
from ._rules import rule_on as rule_on
from ._sharing import sharing as sharing
from ._structure import Structure as Structure
