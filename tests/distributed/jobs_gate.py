"""What the ranks do in the tests of the gate at launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snnpart import parallelize
from snnpart.errors import VerifyError
from snnpart.gate import check_running
from tests.zoo import ZOO


def intact(name: str, tp: int, pp: int, dp: str, single: bool = False) -> tuple[bool, list[float]]:
    """Launch with the gate; then train with a loss that reaches fewer parameters than the gate's did."""
    model = ZOO[name]
    module, inputs = model.build()
    if single:
        module, inputs = module.float(), tuple(x.float() for x in inputs)
    program = parallelize(module, tp=tp, pp=pp, dp=dp, example_inputs=inputs, in_dims=model.in_dims)
    with program.launch(lambda params: torch.optim.SGD(params, lr=0.1), clip_grad_norm=0.01) as running:
        untouched = same(running.state_dict(), module.state_dict())
        targets = torch.zeros(inputs[0].shape[model.in_dims])
        losses = [float(running.train_step(inputs, targets, first_only)) for _ in range(2)]
    return untouched, losses


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def first_only(outputs: Any, targets: Tensor) -> Tensor:
    output = outputs if isinstance(outputs, Tensor) else next(iter(outputs))
    return output.square().mean() + 0.0 * targets.sum()


def tampered(name: str) -> tuple[str, str]:
    """One rank's weight is another one after launch: the gate must see it."""
    model = ZOO[name]
    module, inputs = model.build()
    program = parallelize(module, tp=2, pp=2, example_inputs=inputs, in_dims=model.in_dims, verify="off")
    with program.launch() as running:
        share_of_rank_0 = running._partial.finish
        if running.ranks.rank == 0:
            running._partial.finish = lambda: (share_of_rank_0(), _disturb(running))[0]  # type: ignore[method-assign]
        try:
            check_running(running, inputs)
        except VerifyError as error:
            return type(error).__name__, str(error)
    return "", ""


def _disturb(running: Any) -> None:
    gradient = next(p.grad for p in running.parameters() if p.grad is not None)
    gradient.add_(1.0)
