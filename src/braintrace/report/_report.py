"""A read-only summary of the compiled graph."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TextIO

from .._errors import dotted, value_error
from ..graph import (
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
    HiddenGroup,
    HiddenParamOpRelation,
    ParameterReport,
    Path,
)
from ._advice import Advice, Advise
from ._picture import Picture, Use, draw
from ._summary import summary
from ._svg import fragment, page, write
from ._tree import coloured, encodable, tree

_EXCLUDED = {k for k in DiagnosticKind if k.value.startswith("relation_excluded")}
_EXCLUDED.add(DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW)


class CompilationReport:
    """Groups, traced weights, untraced weights and diagnostics of a compiled graph.

    `parameters` tells for every parameter how it is learned, whether its gradient is exact, and
    what it leaves out; `summary` is one sentence about all, and `advice` names the cheapest rule
    that makes a parameter exact. `show` prints all of it, `draw` a tree of which weight reaches
    which state, and `to_html` makes a drawing; a notebook shows that by itself. `analysis_bytes` is
    the memory that the analysis took.
    """

    __module__ = "braintrace"

    def __init__(
        self,
        hidden_groups: Sequence[HiddenGroup],
        relations: Sequence[HiddenParamOpRelation],
        diagnostics: Sequence[CompilationRecord],
        dynamic_states: Sequence[Path] = (),
        parameters: Mapping[Path, ParameterReport] | None = None,
        uses: Sequence[Use] = (),
        rule: str = "",
        advise: Advise | None = None,
        model: str = "",
        analysis_bytes: int = 0,
    ):
        self.rule, self.model, self._advise = rule, model, advise
        self.analysis_bytes = analysis_bytes
        self.parameters = dict(parameters or {})
        self.hidden_groups = [(g.index, g.hidden_paths) for g in hidden_groups]
        self.etrace_weights = [
            (path, [g.index for g in r.hidden_groups])
            for r in relations
            for path in r.trainable_paths.values()
        ]
        self.excluded_weights: list[tuple[Path, str | None]] = [
            (d.weight_path, d.kind.value)
            for d in diagnostics
            if d.kind in _EXCLUDED and d.weight_path is not None
        ]
        self.diagnostics = tuple(diagnostics)
        self.dynamic_states = list(dynamic_states)
        self._uses = tuple(uses)
        self._traced = [
            f"{dotted(r.weight_path)} ({', '.join(r.trainable_paths)})  {r.primitive.name}"
            f"  -> groups {[g.index for g in r.hidden_groups]}"
            for r in relations
        ]

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers of groups, of weights by how they are learned, of warnings and errors."""
        levels = [d.level for d in self.diagnostics]
        return {
            "hidden_groups": len(self.hidden_groups),
            "etrace_weights": len(self.etrace_weights),
            "excluded_weights": len(self.excluded_weights),
            "inexact": sum(not p.exact and p.how != "none" for p in self.parameters.values()),
            "silent": sum(p.silent is not None for p in self.parameters.values()),
            "warnings": levels.count(DiagnosticLevel.WARNING),
            "errors": levels.count(DiagnosticLevel.ERROR),
        }

    @property
    def summary(self) -> str:
        """What the rule does with this model, in one sentence."""
        return summary(self.parameters.values(), self.rule)

    @cached_property
    def advice(self) -> Advice:
        """For every parameter that is not exact, the cheapest rule that would make it so.

        The step is analysed for other rules when this is asked for; nothing is allocated.
        """
        if self._advise is None:
            raise value_error(
                "there is no advice.",
                why="this report is about a graph, and advice compares with the rule of a learner",
                do="take that of a learner: learner.report.advice or net.report.advice",
            )
        return self._advise()

    def to_str(self, level: int = 1) -> str:
        """The report as text; level 2 adds every warning, level 3 every diagnostic."""
        lines = ["=" * 120, *([self.summary] if self.parameters else []), "Hidden groups"]
        for index, paths in self.hidden_groups:
            lines.append(f"  {index}: {', '.join(map(dotted, paths))}")
        if self.dynamic_states:
            lines += ["Other states", *(f"  {dotted(p)}" for p in self.dynamic_states)]
        lines.append("Weights with an eligibility trace")
        lines += [f"  {line}" for line in self._traced]
        if self.excluded_weights:
            lines.append("Weights trained by their gradient within the step")
            lines += [f"  {dotted(path)}  ({reason})" for path, reason in self.excluded_weights]
        if self.parameters:
            lines.append(self.picture.summary)
            lines += [f"  {line}" for p in self.parameters.values() for line in str(p).split("\n")]
        if level >= 2:
            shown = [d for d in self.diagnostics if level >= 3 or d.level != DiagnosticLevel.INFO]
            lines += ["Diagnostics"] * bool(shown)
            lines += [f"  [{d.level.value}] {d.message}" for d in shown]
        if level >= 3:
            lines.append(f"Memory of the analysis: {self.analysis_bytes:,} bytes")
        lines.append("=" * 120)
        return "\n".join(lines)

    def show(self, level: int = 1, *, file: TextIO | None = None) -> None:
        """Print the report."""
        print(self.to_str(level), file=file or sys.stdout)

    @property
    def picture(self) -> Picture:
        """What a drawing of the graph shows, as data."""
        title = " of ".join(filter(None, [self.rule, self.model]))
        return draw(self.parameters, self.hidden_groups, self._uses, title)

    def draw(self, *, file: TextIO | None = None, color: bool | None = None) -> None:
        """Print which parameter reaches which states through which operator.

        Args:
            file: where to print; default the standard output.
            color: whether to use colours; default on a terminal, unless NO_COLOR is set.
        """
        out = file or sys.stdout
        text = tree(self.picture, coloured(out) if color is None else color)
        print(encodable(text, out), file=out)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The graph as a drawing: a web page that needs nothing besides itself.

        Parameters are coloured by how they are learned, dashed links are left out of the gradient.
        Hover over a box to follow its links and read its part of the report; click or tap to pin
        it. Phones get a narrow layout.

        Args:
            path: a file to write the page to; written whole or not at all.

        Raises:
            FileNotFoundError: the folder of `path` does not exist.
        """
        text = page(self.picture)
        if path is not None:
            write(text, path)
        return text

    def _repr_html_(self) -> str:
        return fragment(self.picture, f"braintrace-{uuid.uuid4().hex}")

    def __str__(self) -> str:
        return self.to_str()

    def __repr__(self) -> str:
        counts = ", ".join(f"{k}={v}" for k, v in self.counts.items())
        return f"CompilationReport({counts})"
