"""What the ranks do in the tests of the vision entry points."""

from __future__ import annotations

import io
import json
import os
import signal
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import TensorDataset

from snnpart import vision
from snnpart.errors import SnnpartError
from snnpart.vision.data.sources import Split
from snnpart.vision.training import Trainer
from tests.vision.nets import Frames


def waves(samples: int = 37, validation: int = 11, dtype: str = "float64") -> Split:
    """Images [1, 4, 4] of three classes, the same everywhere; sizes that divide by nothing."""
    count = samples + validation
    x = torch.sin(torch.arange(count * 16, dtype=torch.float64) * 0.37).reshape(count, 1, 4, 4)
    y = torch.arange(count) % 3
    x = (x + y.view(-1, 1, 1, 1) * torch.linspace(-0.5, 0.5, 16).view(1, 1, 4, 4)).to(getattr(torch, dtype))
    cut = TensorDataset(x, y)
    return Split(torch.utils.data.Subset(cut, range(samples)), torch.utils.data.Subset(cut, range(samples, count)))


def called(command: str, config: dict[str, Any]) -> Any:
    """The entry point's result, or the error's class and text; rank 0's lines of JSON besides."""
    cls = {"train": vision.TrainingConfig, "evaluate": vision.EvaluationConfig, "predict": vision.PredictionConfig}
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            result = getattr(vision, command)(cls[command].from_dict(config))
    except SnnpartError as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}", []
    return result, [json.loads(line) for line in out.getvalue().splitlines()]


def killed_at(config: dict[str, Any], step: int, rank: int) -> None:
    """Train, and kill one rank in the middle of an optimizer step."""
    real = Trainer._optimizer_step

    def dies(self: Trainer, batch: Any) -> Tensor:
        if self.at.step == step and self.running.ranks.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, batch)

    Trainer._optimizer_step = dies  # type: ignore[method-assign]
    try:
        vision.train(vision.TrainingConfig.from_dict(config))
    finally:
        Trainer._optimizer_step = real  # type: ignore[method-assign]


def losses_of(config: dict[str, Any], stop: int | None = None) -> list[float]:
    """The loss of every optimizer step of a training run, which may be told to end early."""
    real, found = Trainer._optimizer_step, list[float]()

    def notes(self: Trainer, batch: Any) -> Tensor:
        total = real(self, batch)
        found.append(float(total) / batch.together)
        return total

    Trainer._optimizer_step = notes  # type: ignore[method-assign]
    try:
        made = vision.TrainingConfig.from_dict(config)
        vision.train(made if stop is None else replace(made, max_steps=stop))
    finally:
        Trainer._optimizer_step = real  # type: ignore[method-assign]
    return found


class _WrongLabel(torch.utils.data.Dataset[Any]):
    """Targets that nobody sees before the sample is read; one is out of range."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1, 4, 4), index / 16, dtype=torch.float64), 9 if index == 5 else index % 3


def wrong_label() -> Split:
    return Split(_WrongLabel(), waves().validation)


class Clips(torch.utils.data.Dataset[Any]):
    """Frames [T, 2, 4, 4] of three T, with targets of four classes."""

    lengths = (3, 4, 3, 5, 4, 3, 3, 4, 5, 5, 4, 3, 4, 5, 3, 4)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        shape = (self.lengths[index], 2, 4, 4)
        return 2 * torch.rand(shape, generator=generator, dtype=torch.float64), index % 4


def clips() -> Split:
    return Split(Clips(), Clips())


def clip_net() -> torch.nn.Module:
    return Frames().double()


class _Deadly(torch.utils.data.Dataset[Any]):
    """`waves`, of which rank 1 dies at its 20th sample, unless the marker says that it did so before."""

    def __init__(self, marker: Path) -> None:
        self._samples, self._marker, self._read = waves().training, marker, 0

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self._read += 1
        if os.environ.get("RANK") == "1" and self._read == 20 and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._samples[index]


def deadly(marker: str) -> Split:
    return Split(_Deadly(Path(marker)), waves().validation)
