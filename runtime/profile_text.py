"""`snnpart profile`: launches a program twice (see `profiling`) and says where a train step's time goes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from snnpart.program import CompiledProgram
from snnpart.roofline import Work, total
from snnpart.runtime import kernel_kinds, profiling
from snnpart.runtime.captures import WARM
from snnpart.runtime.kernel_kinds import Share
from snnpart.runtime.launch import launch
from snnpart.runtime.profiling import Row, Whole
from snnpart.runtime.ranks import Ranks

SHOWN, NAMED = 25, 70
"""Modules that are listed, and letters of a kernel's name."""
Least = Callable[[tuple[int, int], int], tuple[Work, ...]]
"""The roofline's tasks of a rank, by its place on (pp, tp) and the number of ranks that deal the optimizer out."""


def profile_text(
    compiled: CompiledProgram,
    inputs: Any,
    device: str,
    execution: str,
    precision: str,
    *,
    least: Least,
    trace: Path | None = None,
) -> str:
    """The profile of train steps with AdamW on `inputs`, as text; empty on all ranks but the first. Collective.

    Args:
        trace: where a Chrome trace of the steps as they run is written; ranks but the first add their number.
    """
    options: dict[str, Any] = {"device": device, "precision": precision, "check_inputs": False, "verify": False}
    with launch(profiling.marked(compiled), optimizer=_adamw, execution="eager", **options) as running:
        step = lambda: running.train_step(inputs, _targets(running, inputs), _loss)  # noqa: E731
        for _ in range(2):
            step()
        rows = profiling.by_module(step, compiled, running.ranks.device)
    with launch(compiled, optimizer=_adamw, execution=execution, **options) as running:
        step = lambda: running.train_step(inputs, _targets(running, inputs), _loss)  # noqa: E731
        for _ in range(WARM + 2):
            step()
        ranks, notices = running.ranks, list(running.notices)
        whole = profiling.whole(step, ranks.device, trace=_own(trace, ranks))
        works = works_of(compiled, ranks, least)
        longest = max(ranks.gather(total(works)))
        shares = ranks.gather((ranks.at.pp, whole.waiting / whole.step))
    text = [*_summary(compiled, whole, longest), *_bubble(compiled, shares), *notices, "", *_table(rows), ""]
    return "\n".join([*text, *rest_table(shares_of(whole, works, ranks), whole)]) if ranks.rank == 0 else ""


def works_of(compiled: CompiledProgram, ranks: Ranks, least: Least) -> tuple[Work, ...]:
    """The roofline's tasks of this rank."""
    return least((ranks.at.pp, ranks.at.tp), ranks.mesh.dp if compiled.plan.dp == "fsdp2" else 1)


def shares_of(whole: Whole, works: Sequence[Work], ranks: Ranks) -> list[Share]:
    """What each kind of kernel took and needs on this rank."""
    groups = kernel_kinds.CUDA if ranks.device.type == "cuda" else kernel_kinds.CPU
    return kernel_kinds.shares(whole.kernels, works, groups)


def _own(trace: Path | None, ranks: Ranks) -> Path | None:
    """The rank's own file."""
    return trace if trace is None or ranks.rank == 0 else trace.with_stem(f"{trace.stem}-rank{ranks.rank}")


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _targets(running: Any, inputs: Any) -> Tensor:
    """One number a sample: the loss does not look at them."""
    infos = running.compiled.source.inputs
    leaves = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    sizes = [x.shape[info.batch_dim] for info, x in zip(infos, leaves, strict=True) if info.batch_dim is not None]
    return torch.zeros(sizes[0] if sizes else 1)


def _loss(outputs: Any, _: Tensor) -> Tensor:
    found = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([x.float().square().mean() for x in found]).sum()


def _summary(compiled: CompiledProgram, whole: Whole, longest: float) -> list[str]:
    """The step as a whole beside the prediction and the roofline, in microseconds, of the rank with the most work."""
    predicted, _ = profiling.predictions(compiled)
    return [
        f"step            {whole.step / 1e3:9.3f} ms   predicted {predicted / 1e3:.3f} ms",
        f"computing       {whole.busy / 1e3:9.3f} ms   of it communication {whole.communication / 1e3:.3f} ms",
        f"gaps            {100 * whole.gaps:9.1f} %",
        f"roofline        {longest / 1e3:9.3f} ms   {100 * longest / whole.step:.1f} % of the step: each task at the "
        "larger of flops over rate and bytes over bandwidth",
    ]


def _bubble(compiled: CompiledProgram, shares: Sequence[tuple[int, float]]) -> list[str]:
    """What share of a step the pipeline's ranks wait for each other, of all and of each, beside the prediction."""
    if compiled.plan.pp == 1:
        return []
    each = [statistics.mean(share for at, share in shares if at == rank) for rank in range(compiled.plan.pp)]
    _, predicted = profiling.predictions(compiled)
    return [
        f"waiting         {100 * statistics.mean(each):9.1f} %    predicted {100 * predicted:.1f} % for other "
        f"pipeline ranks; of each {', '.join(f'{100 * share:.1f}' for share in each)}"
    ]


def _table(rows: Sequence[Row]) -> list[str]:
    """The longest modules; forward and backward as they take when each kernel is launched on its own."""
    total_us = sum(row.total for row in rows) or 1.0
    lines = [
        f"{'module':40} {'pass':18} {'forward':>10} {'backward':>10} {'share':>7} {'predicted':>10}   microseconds"
    ]
    for row in rows[:SHOWN]:
        lines.append(
            f"{row.module[-40:]:40} {row.made_by[:18]:18} {row.forward:10.0f} {row.backward:10.0f} "
            f"{100 * row.total / total_us:6.1f}% {row.predicted:10.0f}"
        )
    rest = rows[SHOWN:]
    if rest:
        lines.append(
            f"{f'{len(rest)} more':59} {sum(r.forward for r in rest):10.0f} {sum(r.backward for r in rest):10.0f}"
        )
    return lines


def rest_table(shares: Sequence[Share], whole: Whole) -> list[str]:
    """What the step spends beyond the roofline, by kind of kernel as it runs, and what no kernel fills."""
    head = f"{'kernels':32} {'measured':>10} {'share':>7} {'roofline':>10} {'beyond it':>10}"
    lines = [f"{head}   microseconds; the longest kernel"]
    for one in [*shares, Share("gaps", max(0.0, whole.step - whole.busy), 0.0)]:
        lines.append(
            f"{one.group:32} {one.measured:10.0f} {100 * one.measured / whole.step:6.1f}% {one.least:10.0f} "
            f"{one.measured - one.least:10.0f}   {one.longest[:NAMED]}".rstrip()
        )
    return lines
