"""What the ranks do in the tests of parameters of which several stages hold a copy."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.api import parallelize
from snnpart.errors import LaunchError, SnnpartError
from snnpart.runtime.gradients import local_part
from snnpart.runtime.running import RunningProgram
from tests.distributed.case import fill, reset
from tests.distributed.cases_tied import TIED, LanguageModel
from tests.distributed.jobs import dp_share
from tests.neurons import LIF

ROWS, LOSS = TIED["tied ends"].batches, TIED["tied ends"].loss_fn(1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def copies(running: RunningProgram, names: tuple[str, ...]) -> dict[str, list[Tensor]]:
    """This rank's part of each parameter it holds a copy of, and of the optimizer's state for it."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in running.named_parameters():
        if name in names and running.optimizer is not None:
            state = [x for x in running.optimizer.state[parameter].values() if isinstance(x, Tensor)]
            found[name] = [local_part(x).detach().clone() for x in (parameter, *state)]
    return found


def train(name: str, execution: str, **topology: Any) -> dict[str, Any]:
    """Four steps with clipping, after all checks of the gate: losses, norm, state, this rank's copies and place."""
    case = TIED[name]
    program = parallelize(case.model(), example_inputs=case.batches()[0][0], **topology)
    running: Any = program.launch(sgd, execution=execution, clip_grad_norm=0.05)
    losses = []
    for x, y in case.batches() * 2:
        losses.append(
            running.train_step(dp_share(x, 0, running.ranks), dp_share(y, 0, running.ranks), case.loss).item()
        )
    result = {"losses": losses, "norm": float(running.grad_norm), "state": running.state_dict()}
    result["shorter"] = running.eval_step(case.batches()[0][0][:, :3])
    at = running.ranks.at
    result |= {"copies": copies(running, program.plan.tied), "at": (at.dp, at.tp), "tied": program.plan.tied}
    running.close()
    return result


class TwoOutputs(LanguageModel):
    """What the first end makes, and the logits of the second; the bias of the first is read by both."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.emb(tokens) * 2, super().forward(tokens)


def early(out: Any, _: Tensor) -> Tensor:
    """A loss of the first output alone: it does not reach the second copy."""
    loss: Tensor = out[0].square().mean()
    return loss


def late(out: Any, target: Tensor) -> Tensor:
    loss: Tensor = LOSS(out[1], target)
    return loss


def reaches(order: tuple[str, ...]) -> dict[str, Any]:
    """Steps without an optimizer, so that gradients add up, whose losses reach one copy or both; or what is raised."""
    (x, y), _ = ROWS()
    program = parallelize(fill(TwoOutputs(), scale=0.9), pp=2, example_inputs=x, microbatches=2, verify="off")
    assert program.plan.tied == ("emb.weight",)
    running: Any = program.launch(verify=False)
    error = ""
    try:
        for name in order:
            running.train_step(x, y, {"early": early, "late": late}[name])
    except LaunchError as raised:
        error = str(raised)
    result = {"error": error, "gradients": {} if error else running.gradients()}
    running.close()
    return result


def from_values(**topology: Any) -> dict[str, Any]:
    """A network without numbers that is launched with those of another."""
    (x, y), _ = ROWS()
    with torch.device("meta"):
        blank = LanguageModel().double()
    program = parallelize(blank, example_inputs=x, **topology)
    running: Any = program.launch(sgd, values=fill(LanguageModel(), scale=0.9).state_dict())
    loss = running.train_step(x, y, LOSS).item()
    result = {"loss": loss, "state": running.state_dict(), "tied": program.plan.tied}
    running.close()
    return result


def saved_program(folder: str) -> dict[str, Any]:
    """A program written to a folder by rank 0's process and read by every rank."""
    from snnpart import load

    (x, y), _ = ROWS()
    running: Any = load(folder).launch(sgd)
    loss = running.train_step(x, y, LOSS).item()
    result = {"loss": loss, "state": running.state_dict()}
    running.close()
    return result


def frozen() -> dict[str, Any]:
    """The tied matrix does not learn: both stages hold it, nothing is exchanged."""
    (x, y), _ = ROWS()
    model: nn.Module = fill(LanguageModel(), scale=0.9)
    model.emb.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    program = parallelize(model, pp=2, example_inputs=x, microbatches=2, verify="off")
    running: Any = program.launch(sgd)
    loss = running.train_step(x, y, LOSS).item()
    result = {"loss": loss, "groups": len(running._engine.copies), "state": running.state_dict()}
    result["tied"] = program.plan.tied
    running.close()
    return result


def late_to_the_exchange() -> None:
    """Rank 1 does its part of the step and then comes too late to sum the gradients of the copies."""
    (x, y), _ = ROWS()
    program = parallelize(fill(LanguageModel(), scale=0.9), pp=2, example_inputs=x, microbatches=2, verify="off")
    running: Any = program.launch(sgd, timeout=timedelta(seconds=2), verify=False)
    running.train_step(x, y, LOSS)
    if running.ranks.rank == 1:
        running._engine.finish_sums = lambda: time.sleep(30)
    running.train_step(x, y, LOSS)


class Counting(nn.Module):
    """A mask that every layer reads; in training a buffer is counted up that evaluation reads at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.fire = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), LIF(vth=0.2)
        self.register_buffer("mask", torch.ones(4, dtype=torch.float64))
        self.register_buffer("seen", torch.ones(1, dtype=torch.float64))
        self.mask: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        if self.training:
            self.seen = self.seen + 1
        scale = 1.0 if self.training else self.seen
        x = self.layers[0](x * self.mask) * scale
        x = self.layers[1](self.fire(x) * self.mask)
        out: Tensor = self.layers[2](x * self.mask) * scale
        return out


def counting() -> dict[str, Any]:
    """Evaluation on two stages, and what a train step says."""
    model, x = fill(Counting(), scale=0.9).eval(), TIED["everywhere"].batches()[0][0][:, :4]
    program = parallelize(model, pp=2, example_inputs=x, microbatches=2, verify="off", split_at=["layers.2"])
    running: Any = program.launch(sgd, verify=False)
    result = {"tied": program.plan.tied, "outputs": running.eval_step(x), "error": ""}
    try:
        running.train_step(x, torch.zeros(len(x)), lambda out, _: out.mean())
    except SnnpartError as error:
        result["error"] = f"{type(error).__name__}: {error}"
    running.close()
    return result
