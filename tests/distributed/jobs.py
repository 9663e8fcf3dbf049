"""What the ranks do in the distributed tests: functions that `Pool.run` calls by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from snnpart.api import parallelize
from snnpart.runtime.launch import launch
from snnpart.runtime.running import RunningProgram
from tests.distributed.cases import CASES
from tests.distributed.compiled import compile_case
from tests.distributed.handmade import compile_by_hand, make_net


def batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64) * 2
    return x, torch.randint(0, 3, (size,), generator=generator)


def train_handmade(
    sizes: list[list[int]], *, lr: float = 0.1, clip: float | None = None, **lowering: Any
) -> dict[str, Any]:
    """Train steps with SGD and momentum; `sizes[step][dp rank]` samples each."""
    program = compile_by_hand(make_net(), **lowering)
    factory = lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9)
    running = launch(program, optimizer=factory, clip_grad_norm=clip)
    losses, grads = [], {}
    for step, per_rank in enumerate(sizes):
        x, y = batch(step, sum(per_rank))
        start = sum(per_rank[: running.ranks.at.dp])
        mine = slice(start, start + per_rank[running.ranks.at.dp])
        losses.append(running.train_step(x[mine], y[mine], F.cross_entropy).item())
        grads = grads or running.gradients()
    x, y = batch(99, 5)
    outputs, loss = running.eval_step(x, y, F.cross_entropy)
    result = {
        "losses": losses,
        "gradients": grads,
        "state": running.state_dict(),
        "outputs": outputs,
        "eval": loss.item(),
    }
    running.close()
    return result


def run_case(name: str, *, learn: bool = False, clip: float | None = None, **topology: Any) -> dict[str, Any]:
    """The steps of a case: losses, gradients, outputs, state. Without `learn` gradients accumulate over the steps."""
    case, (running, compiled) = CASES[name], launch_case(name, learn=learn, clip=clip, **topology)
    losses, outputs, loss_of_eval = [], [], []
    for x, y in case.batches():
        mine_x, mine_y = dp_share(x, case.batch_dim, running.ranks), dp_share(y, case.target_dim, running.ranks)
        loss = case.loss_fn(x.shape[case.batch_dim])
        losses.append(running.train_step(mine_x, mine_y, loss).item())
        out, value = running.eval_step(mine_x, mine_y, loss)
        outputs.append(out)
        loss_of_eval.append(value.item())
    result = {
        "losses": losses,
        "gradients": running.gradients(),
        "outputs": outputs,
        "eval": loss_of_eval,
        "state": running.state_dict(),
        "replicated": {n: p.detach().clone() for n, p in running.named_parameters() if _whole(compiled, running, n)},
        "plan": compiled.plan.to_json(),
        "owned": [name for name, _ in running.named_parameters()],
    }
    running.close()
    return result


def run_overflow() -> dict[str, Any]:
    """One step of case A23 over two tp ranks: what is raised, and the state after it."""
    running, _ = launch_case("A23", learn=True, clip=1.0, tp=2, microbatches=1, shard={"l": "column"})
    (x, y), error = CASES["A23"].batches()[0], "nothing"
    try:
        running.train_step(x, y, F.cross_entropy)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    result = {"error": error, "state": running.state_dict()}
    running.close()
    return result


def launch_case(name: str, *, learn: bool = False, clip: float | None = None, **topology: Any) -> tuple[Any, Any]:
    """The case's network, compiled and launched; with `learn` by SGD with momentum."""
    compiled = compile_case(CASES[name], **topology)
    factory = (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)) if learn else None
    return launch(compiled, optimizer=factory, clip_grad_norm=clip, target_dim=CASES[name].target_dim), compiled


def dp_share(x: Tensor, dim: int, ranks: Any) -> Tensor:
    """This dp rank's part of a whole batch."""
    return x.tensor_split(ranks.mesh.dp, dim)[ranks.at.dp]


def _whole(compiled: Any, running: Any, name: str) -> bool:
    stage = compiled.stage(running.ranks.at.pp, running.ranks.at.tp)
    return any(part.name == name and part.dim is None for part in stage.tensors)


def ramp(out: Any, _: Any) -> Tensor:
    """A loss that treats every output unlike the others: a mean over samples of outputs weighted 1, 2, 3, ..."""
    leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    return torch.stack([(x * torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)).mean() for x in leaves]).sum()


def launch_zoo(name: str, optimizer: Any = None, **topology: Any) -> tuple[Any, RunningProgram]:
    """A model of the zoo, and it launched."""
    from tests.zoo import ZOO

    model = ZOO[name]
    module, inputs = model.build()
    without_dropout(module)
    options = {"in_dims": model.in_dims, "time_steps": model.steps, "verify": "off", **topology}
    if model.steps and model.time_dim is not None:
        options |= {"in_dims": None, "input_layout": layout(model)}
    running = parallelize(module, example_inputs=inputs, **options).launch(optimizer)
    assert isinstance(running, RunningProgram)
    return model, running


def train_zoo(name: str, **topology: Any) -> dict[str, Any]:
    """Two steps of SGD on the example inputs of seeds 0 and 1: losses, state, outputs for the first."""
    model, running = launch_zoo(name, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), **topology)
    losses = [running.train_step(model.inputs(seed=seed), torch.zeros(2), ramp).item() for seed in range(2)]
    result = {"losses": losses, "state": running.state_dict(), "outputs": running.eval_step(model.inputs(seed=0))}
    running.close()
    return result


def run_zoo(name: str, **topology: Any) -> dict[str, Any]:
    """One step of a model of the zoo, dp rank r on the example inputs of seed r: loss, gradients, state, outputs."""
    model, running = launch_zoo(name, **topology)
    mine = model.inputs(seed=running.ranks.at.dp)
    loss = running.train_step(mine, torch.zeros(2), ramp).item()
    result = {"loss": loss, "gradients": running.gradients(), "state": running.state_dict()}
    result["outputs"] = running.eval_step(mine)
    running.close()
    return result


def without_dropout(module: torch.nn.Module) -> None:
    """Masks drawn by other ranks would differ from one process's."""
    for part in module.modules():
        if "Dropout" in type(part).__name__:
            part.p = 0.0


def layout(model: Any) -> str:
    """The layout of the model's input, its time dim included."""
    letters = [chr(ord("a") + dim) for dim in range(len(model.shapes[0]))]
    letters[model.in_dims], letters[model.time_dim] = "N", "T"
    return "".join(letters)
