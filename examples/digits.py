"""Handwritten digits with an unmodified spiking network on 4 processes: 2 pipeline stages, 2 ranks for the channels.

    torchrun --nproc-per-node 4 examples/digits.py                          SpikingJelly's SEW-ResNet
    torchrun --nproc-per-node 4 examples/digits.py --framework snntorch     a snnTorch network with its loop over time

`tools/quickstart` sets the environment up and runs this. Rank 0 first makes the first steps in plain PyTorch, in one
process and without snnpart; the losses of the parallel program must be the same to 1e-5. Numbers are float64, so that
a sum in another order cannot flip a spike.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn

from snnpart import parallelize

TP, PP, MICROBATCHES = 2, 2, 2
SAME_STEPS = 20
TOLERANCE = 1e-5
GOAL = 0.9


@dataclass(frozen=True)
class Task:
    """A network, the images as it takes them, how many of them make a step, and its learning rate."""

    model: nn.Module
    size: int
    channels: int
    batch: int
    rate: float
    epochs: int
    reset: Callable[[nn.Module], None]
    layout: str
    steps: int = 0

    def inputs(self, images: Tensor) -> Tensor:
        """The images [N, C, H, W] as the network takes them: once, or once for each of its time steps."""
        return images.unsqueeze(0).repeat(self.steps, 1, 1, 1, 1) if self.layout == "TNCHW" else images


@dataclass(frozen=True)
class Images:
    """Images [n, C, H, W] and their digits [n], for training and for validation."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]


def spikingjelly_task() -> Task:
    """SpikingJelly's SEW-ResNet with one block a stage: 12 convolutions, 4 residual connections, 2 steps."""
    from spikingjelly.activation_based import functional, neuron, surrogate
    from spikingjelly.activation_based.model import sew_resnet

    model = sew_resnet.SEWResNet(
        sew_resnet.BasicBlock,
        [1, 1, 1, 1],
        num_classes=10,
        cnf="ADD",
        spiking_neuron=neuron.LIFNode,
        surrogate_function=surrogate.ATan(),
        detach_reset=True,
        v_threshold=0.5,
    )
    functional.set_step_mode(model, "m")
    return Task(
        model.double(),
        size=16,
        channels=3,
        batch=64,
        rate=2e-3,
        epochs=4,
        reset=functional.reset_net,
        layout="TNCHW",
        steps=2,
    )


def snntorch_task() -> Task:
    """A residual network of snnTorch neurons with its own loop over time."""
    from snntorch_net import ResidualNet

    return Task(
        ResidualNet().double(),
        size=8,
        channels=1,
        batch=64,
        rate=4e-3,
        epochs=5,
        reset=lambda model: None,
        layout="NCHW",
    )


TASKS = {"spikingjelly": spikingjelly_task, "snntorch": snntorch_task}


def load_images(task: Task) -> Images:
    """scikit-learn's 1797 digits of 8 x 8, made as large as the network wants; a fifth is kept for validation."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float64)[:, None] / 16
    images = F.interpolate(images, size=(task.size, task.size), mode="bilinear", align_corners=False)
    images = ((images - images.mean()) / images.std()).expand(-1, task.channels, -1, -1).contiguous()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, targets = images[order], torch.tensor(digits.target)[order]
    cut = len(images) * 4 // 5
    return Images((images[:cut], targets[:cut]), (images[cut:], targets[cut:]))


def batches(task: Task, images: Images, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The training images in the epoch's order; the last ones that fill no batch are left for another epoch."""
    x, y = images.train
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1 + epoch))
    for start in range(0, len(x) - task.batch + 1, task.batch):
        chosen = order[start : start + task.batch]
        yield x[chosen], y[chosen]


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the mean over time; output [T, N, 10]."""
    return F.cross_entropy(output.mean(0), targets)


def optimizer_for(task: Task) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=task.rate)


@contextmanager
def all_cores() -> Iterator[None]:
    """Let torch use every core: what is done here, is done while the other ranks wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@all_cores()
def reference_losses(task: Task, images: Images, steps: int) -> list[float]:
    """Losses of the first steps of plain PyTorch on a copy of the model, gradients accumulated over microbatches."""
    model = copy.deepcopy(task.model)
    optimizer = optimizer_for(task)(model.parameters())
    losses: list[float] = []
    for epoch in range(steps):
        for x, y in batches(task, images, epoch):
            if len(losses) == steps:
                return losses
            optimizer.zero_grad()
            total = 0.0
            for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                task.reset(model)
                loss = loss_of(model(task.inputs(part)), target) * (len(part) / len(x))
                loss.backward()
                total += loss.item()
            optimizer.step()
            losses.append(total)
    return losses


@dataclass
class Score:
    """Right answers and answers."""

    right: int = 0
    seen: int = 0

    def add(self, output: Tensor, targets: Tensor) -> None:
        """Count a batch; output [T, N, 10]."""
        self.right += int((output.detach().mean(0).argmax(1) == targets).sum())
        self.seen += len(targets)

    def shared(self) -> float:
        """The accuracy that the last rank counted, on every rank: only the last stage sees the network's output."""
        counts = torch.tensor([self.right, self.seen])
        dist.broadcast(counts, src=dist.get_world_size() - 1)
        return float(counts[0]) / max(int(counts[1]), 1)


class Display:
    """What rank 0 shows: a bar on a terminal, plain lines elsewhere. Other ranks show nothing."""

    def __init__(self, show: bool) -> None:
        self.console = Console(quiet=not show, highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            disable=not show or not self.console.is_terminal,
        )

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)


def train(running: Any, task: Task, images: Images, display: Display) -> list[dict[str, float]]:
    """Train for the task's epochs; one row an epoch."""
    rows, losses = [], []
    steps = len(images.train[0]) // task.batch
    with display.bar as bar:
        for epoch in range(task.epochs):
            started, score = time.perf_counter(), Score()
            line = bar.add_task(f"epoch {epoch + 1}", total=steps)
            for x, y in batches(task, images, epoch):
                losses.append(float(running.train_step(task.inputs(x), y, counting(score))))
                bar.advance(line)
            accuracy = score.shared()
            rows.append(
                {
                    "epoch": epoch + 1,
                    "loss": sum(losses[-steps:]) / steps,
                    "train_accuracy": accuracy,
                    "validation_accuracy": validate(running, task, images),
                    "seconds": time.perf_counter() - started,
                    "losses": losses[-steps:],
                }
            )
            display.say(describe(rows[-1]))
    return rows


def counting(score: Score) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss, which counts right answers on the way."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        score.add(output, targets)
        return loss_of(output, targets)

    return loss


def validate(running: Any, task: Task, images: Images) -> float:
    """Accuracy on the images that are not trained on."""
    score = Score()
    for x, y in zip(*(part.split(task.batch) for part in images.validation), strict=True):
        score.add(running.eval_step(task.inputs(x)), y)
    return score.right / score.seen


def describe(row: dict[str, Any]) -> str:
    return (
        f"epoch {row['epoch']}: loss {row['loss']:.4f}, accuracy {row['train_accuracy']:.1%} in training, "
        f"{row['validation_accuracy']:.1%} in validation, {row['seconds']:.1f} s"
    )


def compare(rows: list[dict[str, Any]], reference: list[float], display: Display) -> float:
    """The largest difference to one process over the first steps."""
    losses = [loss for row in rows for loss in row["losses"]]
    difference = max(abs(a - b) for a, b in zip(reference, losses, strict=False))
    display.say(
        f"the first {len(reference)} losses differ from plain PyTorch in one process by at most {difference:.1e} "
        f"(allowed: {TOLERANCE:.0e})"
    )
    return difference


def verdict(rows: list[dict[str, Any]], difference: float) -> list[str]:
    """What went wrong, in words; nothing when all is well."""
    best, seconds = max(row["validation_accuracy"] for row in rows), sum(row["seconds"] for row in rows)
    wrong = []
    if not difference <= TOLERANCE:
        wrong.append(f"losses differ from one process by {difference:.1e}, more than {TOLERANCE:.0e}")
    if best <= GOAL:
        wrong.append(f"validation accuracy {best:.1%} is not over {GOAL:.0%} after {seconds:.0f} s")
    return wrong


def main() -> int:
    """Compile, report, train, compare; exit code 1 when the losses differ or the network did not learn."""
    parser = argparse.ArgumentParser(description="Train a spiking network on handwritten digits on 4 processes.")
    parser.add_argument("--framework", choices=TASKS, default="spikingjelly")
    parser.add_argument("--epochs", type=int, help="instead of the task's own number")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="folder of the report")
    options = parser.parse_args()
    torch.manual_seed(0)
    task = TASKS[options.framework]()
    task = replace(task, epochs=options.epochs or task.epochs)
    images, first = load_images(task), int(os.environ.get("RANK", 0)) == 0
    display = Display(first)
    program = parallelize(
        task.model,
        tp=TP,
        pp=PP,
        microbatches=MICROBATCHES,
        example_inputs=task.inputs(images.train[0][: task.batch]),
        input_layout=task.layout,
    )
    if first:
        write_report(program.report(), options.output, display)
    reference = reference_losses(task, images, SAME_STEPS) if first else []
    running = program.launch(optimizer=optimizer_for(task))
    rows = train(running, task, images, display)
    trained = running.state_dict()
    running.close()
    if not first:
        return 0
    save(program, trained, task, images, options.output)
    return finish(rows, reference, options.output, display)


def write_report(report: Any, folder: Path, display: Display) -> None:
    """The report as text, JSON and one HTML page."""
    display.say(report.text(width=120).split("\n\n")[0])
    paths = [report.write(folder / f"report.{ending}") for ending in ("txt", "json", "html")]
    display.say("partition report: " + ", ".join(map(str, paths)))


def save(program: Any, trained: dict[str, Tensor], task: Task, images: Images, folder: Path) -> None:
    """The trained program, and the validation images with their samples first: `snnpart run` takes both."""
    program.save(folder / "program", trained)
    x, y = images.validation
    inputs = task.inputs(x)
    np.savez(folder / "validation.npz", inputs=inputs.movedim(task.layout.index("N"), 0).numpy(), targets=y.numpy())


def finish(rows: list[dict[str, Any]], reference: list[float], folder: Path, display: Display) -> int:
    """Compare, write what was measured, and say what went wrong."""
    difference = compare(rows, reference, display)
    measured = {"epochs": rows, "one_process_losses": reference, "largest_difference": difference}
    (folder / "training.json").write_text(json.dumps(measured, indent=1), encoding="utf-8")
    wrong = verdict(rows, difference)
    for line in wrong:
        display.say(f"FAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
