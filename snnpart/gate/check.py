"""check_trace and check_program: let a program through only when it computes what the user's module computes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import facts
from snnpart.errors import VerifyError
from snnpart.frameworks import adapter_for
from snnpart.gate.compare import Differences, Mismatch, compare
from snnpart.gate.locate import first_difference
from snnpart.gate.observe import Observed, Reset, observe_graph, observe_module
from snnpart.gate.program import observe_program
from snnpart.graph import SpikeGraph
from snnpart.program import CompiledProgram

LOW, HIGH = 0.01, 0.99
"""A neuron layer whose rate is outside is not counted as verified."""


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """What was compared and how far apart it was.

    Attributes:
        traced: largest differences of the traced graph from the module, relative (0.0: bit-equal).
        program: the same of the lowered program under all its ranks; None when it was not compared.
        unverified: neuron layers that were silent or always on in the example, with their rates.
        seconds: time the comparison took.
    """

    traced: Differences
    program: Differences | None = None
    unverified: dict[str, float]
    seconds: float


def check_trace(model: nn.Module, graph: SpikeGraph, inputs: Any, *, reset: Reset | None = None) -> GateReport:
    """Compare the traced graph with the module on `inputs`, forward and backward.

    Args:
        model: the user's module; left exactly as it was.
        inputs: a tensor, a tuple of positional or a dict of keyword arguments, as for `trace`.
        reset: the user's own way to reset the module's state.

    Raises:
        VerifyError: outputs, a gradient or a buffer differ; it names the first node that does. NaN or Inf in inputs or
            in the module's own outputs.
    """
    start = time.perf_counter()
    _refuse_not_finite(inputs)
    want = observe_module(model, graph, inputs, reset)
    _refuse_bad_reference(want, graph)
    got = observe_graph(graph, inputs)
    differences, wrong = compare(want, got)
    if wrong or want.structure != got.structure:
        raise _refusal(model, graph, inputs, reset, wrong)
    return GateReport(traced=differences, unverified=_unverified(got, graph), seconds=time.perf_counter() - start)


def check_program(
    model: nn.Module,
    compiled: CompiledProgram,
    inputs: Any,
    report: GateReport | None = None,
    *,
    reset: Reset | None = None,
) -> GateReport:
    """Compare the lowered program, all its ranks simulated in this process, with the module on `inputs`.

    Args:
        report: what `check_trace` found; its figures are kept.

    Raises:
        VerifyError: as `check_trace`; it names the output, parameter or buffer that differs.
    """
    start = time.perf_counter()
    _refuse_not_finite(inputs)
    want = observe_module(model, compiled.source, inputs, reset)
    want.buffers = {n: value for n, value in want.buffers.items() if compiled.source.tensors[n].leaf is None}
    differences, wrong = compare(want, observe_program(compiled, inputs, want))
    if wrong:
        raise VerifyError(
            f"the lowered program differs from the module: {_list(wrong)}",
            where=f"{compiled.source.name}, tp={compiled.plan.tp}, pp={compiled.plan.pp}",
            fix='report it with the model, or compile with verify="trace" to go on without this comparison',
        )
    seconds = time.perf_counter() - start
    if report is None:
        report = GateReport(traced=differences, unverified=_unverified(want, compiled.source), seconds=0.0)
    return replace(report, program=differences, seconds=report.seconds + seconds)


def _refuse_not_finite(inputs: Any) -> None:
    for path, value in pytree.tree_flatten_with_path(inputs)[0]:
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            bad = int((~torch.isfinite(value)).sum())
            raise VerifyError(
                f"example input{pytree.keystr(path)} holds {bad} values that are NaN or infinite",
                fix="give finite example inputs: nothing can be compared with these",
            )


def _refuse_bad_reference(want: Observed, graph: SpikeGraph) -> None:
    for position, output in enumerate(want.outputs):
        if output.is_floating_point() and not bool(torch.isfinite(output).all()):
            raise VerifyError(
                f"output {position} of the module itself holds NaN or infinite values for the example inputs",
                where=graph.name,
                fix='give other example inputs, or compile with verify="off"',
            )


def _refusal(
    model: nn.Module, graph: SpikeGraph, inputs: Any, reset: Reset | None, wrong: list[Mismatch]
) -> VerifyError:
    node = first_difference(model, graph, inputs, reset)
    if node is None and wrong:
        node = next((n for n in graph.graph.nodes if n.op == "get_attr" and n.target == wrong[0].name), None)
    where = facts.place(node) if node is not None else graph.name
    what = f"the traced graph differs from the module: {_list(wrong)}" if wrong else "its result has another structure"
    return VerifyError(what, where=where, fix='report it with the model; verify="off" goes on without the comparison')


def _list(wrong: list[Mismatch]) -> str:
    shown = [f"{m.kind} '{m.name}' by {m.difference:.2g} of its scale (allowed {m.tolerance:.0e})" for m in wrong[:3]]
    return ", ".join(shown) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def _unverified(seen: Observed, graph: SpikeGraph) -> dict[str, float]:
    """The spiking layers whose rate shows nothing."""
    rates = {layer: seen.rate(layer) for layer in seen.spikes if not _integrates(layer, graph)}
    return {layer: rate for layer, rate in rates.items() if not LOW <= rate <= HIGH}


def _integrates(layer: str, graph: SpikeGraph) -> bool:
    """Whether the layer's output is a membrane, which is never zero."""
    leaf = graph.leaves.get(layer)
    return leaf is not None and adapter_for(leaf.module).output_domain(leaf.module).kind == "real"
