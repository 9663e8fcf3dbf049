"""check_trace and check_program: let a program through only when it computes what the user's module computes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import facts
from snnpart.errors import VerifyError
from snnpart.frameworks import adapter_for
from snnpart.gate.compare import Differences, Mismatch, compare
from snnpart.gate.domains import check_domains, packs
from snnpart.gate.draws import WithoutDraws, draws_otherwise
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
        precision: the dtype in which the lowered program was compared: float64 where float32 showed a difference that
            a spike flipped by another order of summation may explain.
        seconds: time the comparison took.
        reference: what the module computed, for `check_program`; not part of the report.
    """

    traced: Differences
    program: Differences | None = None
    unverified: dict[str, float]
    precision: str = "the network's own"
    seconds: float
    reference: Observed | None = field(default=None, repr=False, compare=False)


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
    return GateReport(
        traced=differences, unverified=_unverified(got, graph), seconds=time.perf_counter() - start, reference=want
    )


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
    moved = draws_otherwise(compiled.source)
    with WithoutDraws() if moved else nullcontext():
        seen = report.reference if report is not None and not moved else None
        want = observe_module(model, compiled.source, inputs, reset) if seen is None else seen
        if packs(compiled):
            check_domains(compiled, inputs)
        differences, wrong = compare_program(compiled, inputs, want)
        precision = GateReport.precision
        if wrong and (again := _in_double(compiled, inputs)) is not None:
            (differences, wrong), precision = again, "float64"
    if wrong:
        raise VerifyError(
            f"the lowered program differs from the module: {listed(wrong)}",
            where=f"{compiled.source.name}, tp={compiled.plan.tp}, pp={compiled.plan.pp}",
            fix='report it with the model, or compile with verify="trace" to go on without this comparison',
        )
    seconds = time.perf_counter() - start
    if report is None:
        report = GateReport(traced=differences, unverified=_unverified(want, compiled.source), seconds=0.0)
    return replace(report, program=differences, precision=precision, seconds=report.seconds + seconds, reference=None)


def compare_program(compiled: CompiledProgram, inputs: Any, want: Observed) -> tuple[Differences, list[Mismatch]]:
    """The simulated program against an observation; buffers that leaves keep as state are left out."""
    kept = {name: value for name, value in want.buffers.items() if compiled.source.tensors[name].leaf is None}
    want = replace(want, buffers=kept)
    return compare(want, observe_program(compiled, inputs, want))


def _in_double(compiled: CompiledProgram, inputs: Any) -> tuple[Differences, list[Mismatch]] | None:
    """The comparison in float64, against the traced graph, which `check_trace` found equal to the module.

    Sharding sums in another order; in float32 that can flip a spike, and a flipped spike is a large difference of a
    correct program. In float64 only a wrong program differs. None when the network is in float64 already, or cannot
    run in it (a layer that always emits float32).
    """
    tensors = compiled.source.tensors
    if all(info.tensor.dtype is not torch.float32 for info in tensors.values()):
        return None
    doubled = {
        name: replace(info, tensor=_to_double(info.tensor).requires_grad_(info.tensor.requires_grad))
        for name, info in tensors.items()
    }
    wide = replace(compiled, source=replace(compiled.source, tensors=doubled))
    wide_inputs = pytree.tree_map(lambda x: _to_double(x) if isinstance(x, Tensor) else x, inputs)
    try:
        want = observe_graph(wide.source, wide_inputs)
        if not all(output.dtype is torch.float64 for output in want.outputs if output.is_floating_point()):
            return None
        return compare_program(wide, wide_inputs, want)
    except RuntimeError:  # the network's own code insists on float32
        return None


def _to_double(x: Tensor) -> Tensor:
    """x in float64 when it is a floating-point tensor."""
    return x.detach().double() if x.is_floating_point() else x.detach()


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
    what = f"the traced graph differs from the module: {listed(wrong)}" if wrong else "its result has another structure"
    return VerifyError(what, where=where, fix='report it with the model; verify="off" goes on without the comparison')


def listed(wrong: list[Mismatch]) -> str:
    """The worst of what differs, for messages."""
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
