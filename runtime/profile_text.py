"""`snnpart profile`: launches a program twice (see `profiling`) and says where a train step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from snnpart.program import CompiledProgram
from snnpart.runtime import profiling
from snnpart.runtime.captures import WARM
from snnpart.runtime.launch import launch
from snnpart.runtime.profiling import Row, Whole

SHOWN = 25


def profile_text(compiled: CompiledProgram, inputs: Any, device: str, execution: str, precision: str) -> str:
    """The profile of train steps with AdamW on `inputs`, as text; empty on all ranks but the first. Collective."""
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
        whole = profiling.whole(step, running.ranks.device)
        first, notices = running.ranks.rank == 0, list(running.notices)
    return "\n".join([*_summary(compiled, whole), *notices, "", *_table(rows)]) if first else ""


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


def _summary(compiled: CompiledProgram, whole: Whole) -> list[str]:
    """The step as a whole beside the prediction and the roofline."""
    predicted, bubble = profiling.predictions(compiled)
    work = profiling.roofline(compiled) / (compiled.plan.tp * compiled.plan.pp)
    return [
        f"step            {whole.step / 1e3:9.3f} ms   predicted {predicted / 1e3:.3f} ms",
        f"computing       {whole.busy / 1e3:9.3f} ms   of it communication {whole.communication / 1e3:.3f} ms",
        f"gaps            {100 * whole.gaps:9.1f} %    predicted share of waiting in the pipeline {100 * bubble:.1f} %",
        f"roofline        {work / 1e3:9.3f} ms   {100 * work / whole.step:.1f} % of the step: operations at the "
        "larger of flops over rate and bytes over bandwidth",
    ]


def _table(rows: Sequence[Row]) -> list[str]:
    """The longest modules; forward and backward as they take when each kernel is launched on its own."""
    total = sum(row.total for row in rows) or 1.0
    lines = [
        f"{'module':40} {'pass':18} {'forward':>10} {'backward':>10} {'share':>7} {'predicted':>10}   microseconds"
    ]
    for row in rows[:SHOWN]:
        lines.append(
            f"{row.module[-40:]:40} {row.made_by[:18]:18} {row.forward:10.0f} {row.backward:10.0f} "
            f"{100 * row.total / total:6.1f}% {row.predicted:10.0f}"
        )
    rest = rows[SHOWN:]
    if rest:
        lines.append(
            f"{f'{len(rest)} more':59} {sum(r.forward for r in rest):10.0f} {sum(r.backward for r in rest):10.0f}"
        )
    return lines
