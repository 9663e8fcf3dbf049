"""What the ranks do in the tests of launch, state and errors."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.api import parallelize
from snnpart.artifact import load
from snnpart.errors import CheckpointError, LaunchError, SnnpartError
from snnpart.runtime import running as running_module
from snnpart.runtime.launch import launch
from tests.distributed.cases import LIF, Aux, det, fill, mlp, reset
from tests.distributed.handmade import compile_by_hand, make_net
from tests.distributed.jobs import batch


def error_of(action: Any) -> tuple[str, str]:
    """Class and text of the SnnpartError that the action raises; the process group still works after it."""
    try:
        action()
    except SnnpartError as error:
        dist.barrier()
        return type(error).__name__, str(error)
    return "", ""


def other_plan_on_rank(rank: int) -> tuple[str, str]:
    microbatches = 2 if dist.get_rank() == rank else 1
    return error_of(lambda: launch(compile_by_hand(make_net(), pp=2, microbatches=microbatches)))


def other_code_on_rank(rank: int) -> tuple[str, str]:
    compiled = compile_by_hand(make_net(), tp=2)
    if dist.get_rank() == rank:
        graph = compiled.stage(0, 1).graph
        next(node for node in graph.nodes if node.target is torch.mul).args = ()
    return error_of(lambda: launch(compiled))


def twice() -> list[Any]:
    compiled = compile_by_hand(make_net(), pp=2)
    running = launch(compiled)
    second = error_of(lambda: launch(compiled))
    running.close()
    closed = error_of(lambda: running.train_step(*batch(0, 4), F.cross_entropy))
    again = launch(compiled)
    loss = again.train_step(*batch(0, 4), F.cross_entropy).item()
    again.close()
    return [second, closed, loss]


def fails_and_launches_again(where: str) -> dict[str, Any]:
    """A launch that fails on rank 1 alone, or on all after the check; what it leaves, and the loss of the next one."""
    mine = dist.get_rank() == 1
    groups, threads = len(dist.distributed_c10d._world.pg_map), threading.active_count()
    program = compile_by_hand(make_net(), pp=2)
    given: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
    if where == "optimizer" and mine:
        given["optimizer"] = lambda params: torch.optim.SGD(params, lr=-1.0)
    if where == "values":
        given["values"] = {"a.weight": torch.zeros(1)}
    if where == "check":
        given["expected"] = lambda running: running.ranks.agree(LaunchError("it is wrong") if mine else None)
    refuses = mock.patch.object(running_module, "Execution", side_effect=ValueError("no such stream"))
    try:
        with refuses if where == "execution" else nullcontext():
            launch(program, **given)
        kind, text = "", ""
    except (SnnpartError, ValueError) as error:
        kind, text = type(error).__name__, str(error)
    left = len(dist.distributed_c10d._world.pg_map) - groups, threading.active_count() - threads
    again = launch(program)
    loss = again.train_step(*batch(0, 4), F.cross_entropy).item()
    again.close()
    return {"error": (kind, text), "left": left, "loss": loss}


def bad_inputs() -> dict[str, Any]:
    """Each problem is on one rank only and raised on all; afterwards a step still works."""
    running = launch(compile_by_hand(make_net(), pp=2, microbatches=3))
    rank = dist.get_rank()

    def step(x: Tensor, y: Tensor) -> Any:
        return lambda: running.train_step(x, y, F.cross_entropy)

    x, y = batch(0, 9)
    poisoned = x.clone()
    poisoned[1, 2] = float("nan") if rank == 3 else 0.0
    found = {
        "nan": error_of(step(poisoned, y)),
        "small": error_of(step(*(v[:2] if rank == 1 else v for v in (x, y)))),
        "targets": error_of(step(x, y[:5])),
        "count": error_of(lambda: running.train_step((x, x), y, F.cross_entropy)),
        "dims": error_of(step(x[0], y)),
        "signature": error_of(step(x[:, :4], y)),
        "eval": error_of(lambda: running.eval_step(poisoned)),
    }
    found["after"] = running.train_step(x, y, F.cross_entropy).item()
    running.close()
    return found


def wrong_world() -> tuple[str, str]:
    return error_of(lambda: launch(compile_by_hand(make_net(), tp=2)))


def no_cuda() -> tuple[str, str]:
    return error_of(lambda: launch(compile_by_hand(make_net(), pp=2), device="cuda"))


def different_weights() -> tuple[list[str], dict[str, Tensor]]:
    """Every rank initialises for itself; rank 0's weights are taken."""
    running = launch(compile_by_hand(make_net(seed=dist.get_rank()), tp=2, pp=2))
    notices, state = list(running.notices), running.state_dict()
    running.close()
    return notices, state


def state_round_trip(save_how: dict[str, Any], load_how: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Train in one topology, load the full state into another; both states, and what a bad one does."""
    trained = launch(compile_by_hand(make_net(), **save_how), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    dp = trained.ranks.mesh.dp
    x, y = batch(0, 4 * dp)
    trained.train_step(
        x.tensor_split(dp)[trained.ranks.at.dp], y.tensor_split(dp)[trained.ranks.at.dp], F.cross_entropy
    )
    state = trained.state_dict()
    trained.close()
    other = launch(compile_by_hand(make_net(seed=5), **load_how))
    other.load_state_dict(state)
    loaded = other.state_dict()
    other.close()
    return [state, loaded]


def bad_states() -> dict[str, tuple[str, str]]:
    running = launch(compile_by_hand(make_net(), tp=2))
    before = running.state_dict()
    missing = {key: value for key, value in before.items() if key != "d.bias"}
    found = {
        "missing": error_of(lambda: running.load_state_dict(missing)),
        "unexpected": error_of(lambda: running.load_state_dict({**before, "zzz": torch.zeros(1)})),
        "shape": error_of(lambda: running.load_state_dict({**before, "a.bias": torch.zeros(6)})),
    }
    running.load_state_dict({**missing, "zzz": torch.zeros(1)}, strict=False)
    after = running.state_dict()
    running.close()
    if not all(torch.equal(after[key], value) for key, value in before.items()):
        raise CheckpointError("the state changed")
    return found


def exploding() -> tuple[tuple[str, str], bool]:
    """A loss whose gradient is NaN, with clipping: a named error on all ranks, and nothing is changed."""
    running = launch(
        compile_by_hand(make_net(), tp=2, pp=2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), clip_grad_norm=1.0
    )
    before = running.state_dict()
    found = error_of(lambda: running.train_step(*batch(0, 4), lambda out, y: (out.sum() - out.sum()).sqrt()))
    after = running.state_dict()
    same = all(torch.equal(after[n], before[n]) for n, _ in make_net().named_parameters())
    running.close()
    return found, same


def ema_of_a_run_model() -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """A24: compile a model that has just run, average its state over three steps."""
    model = mlp()
    model(det(5, 4))
    kept = model[1].v
    program = parallelize(model, tp=2, pp=2, example_inputs=det(5, 4), verify="off", reset=reset)
    running = program.launch(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), target_dim=0)
    ema = copy.deepcopy(running.state_dict())
    for i in range(3):
        running.train_step(det(5, 4, k=0.5 + 0.1 * i), torch.tensor([0, 1, 2, 0, 1]), F.cross_entropy)
        ema = {n: 0.9 * v + 0.1 * running.state_dict()[n] for n, v in ema.items()}
    state = running.state_dict()
    running.close()
    return ema, state, model[1].v is kept


class Moody(nn.Module):
    """Branches on its mode, writes a buffer in one of them, and loops over T."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n, self.h = nn.Linear(4, 6), LIF(), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        steps = [self.h(self._used(self.n(self.l(step)))) for step in x]
        return torch.stack(steps).mean(0) if self.training else torch.stack(steps).sum(0)

    def _used(self, spikes: Tensor) -> Tensor:
        """Counts spikes of hidden channels in training, and weighs the channels by their counts in evaluation."""
        if self.training:
            self.seen = self.seen + spikes.detach().sum(0)
            return spikes
        return spikes * (1 + 0.1 * self.seen)


def other_signatures() -> dict[str, Any]:
    """Another T and another mode are compiled when they come, with the same plan."""
    program = parallelize(fill(Moody()), tp=2, pp=2, example_inputs=det(3, 4, 4), input_layout="TNF", verify="off")
    running = program.launch(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    y = torch.tensor([0, 1, 2, 0])
    losses = [running.train_step(det(t, 4, 4), y, F.cross_entropy).item() for t in (3, 5, 3, 5)]
    outputs = [running.eval_step(det(t, 4, 4)) for t in (3, 5)]
    notices = list(running.notices)
    running.close()
    return {"losses": losses, "outputs": outputs, "notices": notices}


class Larger(nn.Module):
    """Compares its batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n, self.h = nn.Linear(4, 6), LIF(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        y = self.h(self.n(self.l(x)))
        return y * 2 if x.shape[0] > 1 else y


def compared_batch_sizes(folder: str) -> dict[str, Any]:
    """A microbatch of one sample takes the other way; a saved program refuses it."""
    program = parallelize(fill(Larger()), pp=2, microbatches=2, example_inputs=det(8, 4))
    running = program.launch(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    y = torch.arange(8) % 3
    losses = [running.train_step(det(n, 4), y[:n], F.cross_entropy).item() for n in (8, 3, 2, 8)]
    outputs = [running.eval_step(det(n, 4)) for n in (1, 3, 4)]
    notices = list(running.notices)
    running.close()
    at = f"{folder}/{dist.get_rank()}"
    program.save(at)
    loaded = launch(load(at), verify=False)
    refusal = error_of(lambda: loaded.eval_step(det(1, 4)))
    loaded.close()
    return {"losses": losses, "outputs": outputs, "notices": notices, "refusal": refusal}


def far_more_samples(tp: int, microbatches: int, example: int = 4, **options: Any) -> list[tuple[str, ...]]:
    """The notices after evaluations of more and more samples than the example has."""
    how: dict[str, Any] = {"tp": 2} if tp == 2 else {"pp": 2}
    given = {"example_inputs": det(example, 4), "microbatches": microbatches, "verify": "off", **how, **options}
    running, found = parallelize(fill(Larger()), **given).launch(), list[tuple[str, ...]]()
    for samples in (4, 32, 33, 64, 128):
        running.eval_step(det(samples, 4))
        found.append(tuple(running.notices))
    running.close()
    return found


def changing_losses(dp: str) -> tuple[list[float], dict[str, Tensor], tuple[str, str]]:
    """One answer, then both, then the other one alone."""
    program = parallelize(fill(Aux()), dp=dp, example_inputs=det(4, 4), verify="off")
    running = program.launch(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    losses = []
    for i, loss in enumerate((first_answer, both_answers, both_answers)):
        mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        losses.append(running.train_step(det(8, 4, k=0.3 + 0.1 * i)[mine], (torch.arange(8) % 3)[mine], loss).item())
    state = running.state_dict()
    last = error_of(lambda: running.train_step(det(4, 4), torch.arange(4) % 3, second_answer))
    running.close()
    return losses, state, last


def first_answer(out: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(out[0], y)


def second_answer(out: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(out[1], y)


def both_answers(out: Any, y: Tensor) -> Tensor:
    return first_answer(out, y) + second_answer(out, y)


def fails_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} was asked to fail")
    dist.barrier()
    return dist.get_rank()


def hangs() -> None:
    import time

    if dist.get_rank() == 1:
        time.sleep(60)


def answers() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def eval_of_small_batches() -> list[Tensor]:
    """One sample in a pipeline of three microbatches."""
    running = launch(compile_by_hand(make_net(), pp=2, microbatches=3))
    outputs = [running.eval_step(batch(0, size)[0]) for size in (1, 2, 5)]
    running.close()
    return outputs


def modes() -> dict[str, Any]:
    """train_step in eval mode keeps the averages of BatchNorm; preserved() leaves no trace."""
    running = launch(compile_by_hand(make_net(), pp=2))
    start = running.state_dict()
    with running.preserved():
        running.train_step(*batch(0, 4), F.cross_entropy)
    kept = running.state_dict(), running.gradients()
    running.eval().train_step(*batch(0, 4), F.cross_entropy)
    frozen, gradients = running.state_dict(), running.gradients()
    running.train().train_step(*batch(0, 4), F.cross_entropy)
    moved = running.state_dict()
    running.close()
    return {"start": start, "kept": kept, "frozen": frozen, "gradients": gradients, "moved": moved}


PIECES = {
    "uneven": (((0, 4),), ((4, 7),)),
    "interleaved": (((0, 2), (5, 7)), ((2, 5),)),
    "one empty": (((0, 7),), ()),
}


def collectives(kind: str, last: int | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Every collective over tp = 2 on dim 1: what each rank gets, and the gradient of its input. With `last` both must
    lie with that dim behind the others, however the values that come lie: they do on one rank only."""
    from datetime import timedelta

    from snnpart.ops import select_pieces
    from snnpart.runtime.collectives import GroupCollectives
    from snnpart.runtime.ranks import join

    ranks = join(1, 2, device=torch.device("cpu"), timeout=timedelta(seconds=30))
    backend, me, pieces = GroupCollectives(ranks.axes), ranks.at.tp, PIECES[kind]
    whole = det(2, 7, 3) * (me + 1)
    own = select_pieces(det(2, 7, 3), 1, pieces[me]).clone()
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, x, call in [
        ("all_reduce", whole, lambda x: backend.all_reduce(x, "tp", last)),
        ("grad_all_reduce", whole, lambda x: backend.grad_all_reduce(x, "tp", last)),
        ("all_gather", own, lambda x: backend.all_gather(x, "tp", 1, pieces, last=last)),
        ("partial", own, lambda x: backend.all_gather(x, "tp", 1, pieces, None, True, last)),
        ("bits", (own > 0).double(), lambda x: backend.all_gather(x, "tp", 1, pieces, (0, 2), last=last)),
        ("four bits", (5 * own).round(), lambda x: backend.all_gather(x, "tp", 1, pieces, (-5, 11), True, last)),
        ("bool", own > 0, lambda x: backend.all_gather(x, "tp", -2, pieces, last=last)),
        ("shard", whole, lambda x: backend.shard(x, "tp", 1, pieces, last)),
        ("reduce_scatter", whole, lambda x: backend.reduce_scatter(x, "tp", 1, pieces, last)),
    ]:
        x = (x if last is None or me else lying(x, last)).clone().requires_grad_(x.is_floating_point())
        out = call(x)
        if last is not None and name != "grad_all_reduce":
            assert out.movedim(last, -1).is_contiguous(), name
        grad = torch.empty(0)
        if out.requires_grad:
            (grad,) = torch.autograd.grad((out * det(*out.shape, k=0.3)).sum(), x)
            assert last is None or name == "all_reduce" or grad.movedim(last, -1).is_contiguous(), name
        found[name] = (out.detach(), grad)
    ranks.close()
    return found


def lying(x: Tensor, last: int) -> Tensor:
    """x with this dim behind the others in memory."""
    return x.movedim(last, -1).contiguous().movedim(-1, last)


def sum_of_layouts() -> tuple[Tensor, bool]:
    """The sum over two tp ranks of the same values, contiguous on one and channels-last on the other."""
    from datetime import timedelta

    from snnpart.runtime.collectives import sum_over
    from snnpart.runtime.ranks import join

    ranks = join(1, 2, device=torch.device("cpu"), timeout=timedelta(seconds=30))
    layout = torch.channels_last if ranks.at.tp else torch.contiguous_format
    total = sum_over(det(2, 3, 4, 5).contiguous(memory_format=layout), ranks.axes["tp"])
    ranks.close()
    return total, total.is_contiguous(memory_format=layout)
