"""`snnpart run DIR`: train, evaluate or predict with a saved program, on the ranks that torchrun started.

    torchrun --nproc-per-node 4 -m snnpart run DIR --data digits --epochs 3 --save TRAINED
    torchrun --nproc-per-node 4 -m snnpart run TRAINED --data digits --evaluate
    torchrun --nproc-per-node 4 -m snnpart run TRAINED --data FILE.npz --predict OUT.npz

Every rank reads the same data and takes its dp rank's samples. The first output of the network is its answer, averaged
over its time dim if it has one: scores of classes for integer targets (cross-entropy), else values (squared error).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from snnpart import artifact, datasets
from snnpart.datasets import Dataset
from snnpart.errors import ConfigError, SnnpartError
from snnpart.program import CompiledProgram
from snnpart.runtime.launch import launch
from snnpart.runtime.running import RunningProgram


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all went well, 1 after a named error, 2 for wrong usage."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as error:
        return int(error.code or 0)
    try:
        _run(options)
    except SnnpartError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="snnpart run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", help="a saved program (program.save)")
    parser.add_argument(
        "--data", required=True, help="'digits' or an .npz file with the program's inputs and 'targets'"
    )
    parser.add_argument("--evaluate", action="store_true", help="only report loss and accuracy")
    parser.add_argument("--predict", metavar="OUT.npz", help="only write the answers for every sample")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="samples a step of each data-parallel rank (32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of Adam (0.001)")
    parser.add_argument("--clip", type=float, default=None, help="largest norm of all gradients together")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the samples")
    parser.add_argument("--save", metavar="DIR", help="write the trained program")
    parser.add_argument("--device", default=None, help="cpu or cuda")
    return parser


def _run(options: argparse.Namespace) -> None:
    for name in ("epochs", "batch"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)} is not a positive number")
    compiled = artifact.load(options.directory)
    data = datasets.read(options.data, compiled.source.inputs)
    optimizer = None if options.evaluate or options.predict else lambda p: torch.optim.Adam(p, lr=options.lr)
    with launch(compiled, optimizer=optimizer, clip_grad_norm=options.clip, device=options.device) as running:
        if options.predict:
            _predict(running, data, options)
        elif options.evaluate:
            _say(
                running,
                "evaluation: " + _score(running, data.split()[1] if options.data == "digits" else data, options),
            )
        else:
            _train(running, data, options)
        if options.save:
            state = running.state_dict()
            if running.ranks.rank == 0:
                artifact.save(compiled, options.save, state)


def _train(running: RunningProgram, data: Dataset, options: argparse.Namespace) -> None:
    training, validation = data.split()
    generator = torch.Generator().manual_seed(options.seed)
    answer = _answer(running.compiled)
    for epoch in range(1, options.epochs + 1):
        losses = []
        order = torch.randperm(len(training), generator=generator)
        for index in _shares(order, running, options.batch, smallest=running.compiled.plan.microbatches):
            inputs, targets = training.take(index)
            losses.append(running.train_step(inputs, _need(targets), lambda out, y: _loss(answer(out), y)).item())
        mean = sum(losses) / max(len(losses), 1)
        _say(running, f"epoch {epoch}: training loss {mean:.4f}, validation " + _score(running, validation, options))


def _score(running: RunningProgram, data: Dataset, options: argparse.Namespace) -> str:
    """Loss and accuracy over all samples, each counted once."""
    answer, at = _answer(running.compiled), running.ranks.at
    loss, right, count = 0.0, 0.0, 0.0
    for index, real in _padded(data, running, options.batch):
        inputs, targets = data.take(index)
        out, y = answer(running.eval_step(inputs))[:real].cpu(), _need(targets)[:real]
        if at.tp == 0 and at.pp == 0 and real:
            loss += float(_loss(out, y)) * real
            right += float((out.argmax(1) == y).sum()) if _is_class(y) else 0.0
            count += real
    loss, right, count = running.ranks.sum([loss, right, count])
    accuracy = f", accuracy {100 * right / count:.1f} %" if _is_class(_need(data.targets)) else ""
    return f"loss {loss / count:.4f}{accuracy} ({count:.0f} samples)"


def _predict(running: RunningProgram, data: Dataset, options: argparse.Namespace) -> None:
    answer, at = _answer(running.compiled), running.ranks.at
    found: list[tuple[Any, Any]] = []
    for index, real in _padded(data, running, options.batch):
        out = answer(running.eval_step(data.take(index)[0]))[:real].cpu()
        mine = (index[:real].numpy(), out.numpy()) if at.tp == 0 and at.pp == 0 else None
        found += [part for part in running.ranks.gather(mine) if part is not None]
    if running.ranks.rank == 0:
        order = np.concatenate([index for index, _ in found])
        answers = np.concatenate([out for _, out in found])[np.argsort(order)]
        np.savez(options.predict, outputs=answers)
        _say(running, f"wrote {len(answers)} answers to {options.predict}")


def _shares(order: Tensor, running: RunningProgram, batch: int, smallest: int) -> Iterator[Tensor]:
    """This dp rank's samples of each step; a last step in which a rank would have fewer than `smallest` is left out."""
    dp = running.ranks.mesh.dp
    for step in order.split(batch * dp):
        if len(step) // dp >= smallest:
            yield step.tensor_split(dp)[running.ranks.at.dp]


def _padded(data: Dataset, running: RunningProgram, batch: int) -> Iterator[tuple[Tensor, int]]:
    """This dp rank's samples of each evaluation step and how many of them count: every rank needs at least one."""
    dp = running.ranks.mesh.dp
    for step in torch.arange(len(data)).split(batch * dp):
        mine = step.tensor_split(dp)[running.ranks.at.dp]
        yield (mine, len(mine)) if len(mine) else (step[:1], 0)


def _answer(compiled: CompiledProgram) -> Any:
    """Takes the answer [N, ...] from the network's outputs: the first tensor, batch first, averaged over time."""
    batch_dim = compiled.source.outputs[0].batch_dim

    def answer(outputs: Any) -> Tensor:
        first: Tensor = next(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))
        x = first.movedim(batch_dim or 0, 0)
        return x.flatten(1, -2).mean(1) if x.dim() > 2 else x

    return answer


def _loss(out: Tensor, targets: Tensor) -> Tensor:
    targets = targets.to(out.device)
    return F.cross_entropy(out, targets) if _is_class(targets) else F.mse_loss(out, targets.to(out.dtype))


def _is_class(targets: Tensor) -> bool:
    return not targets.is_floating_point()


def _need(targets: Tensor | None) -> Tensor:
    if targets is None:
        raise ConfigError("the data holds no 'targets'", fix="add them, or use --predict")
    return targets


def _say(running: RunningProgram, text: str) -> None:
    if running.ranks.rank == 0:
        print(text, flush=True)
