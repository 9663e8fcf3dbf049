"""Training: epochs over the data, validation, checkpoints, resuming.

An epoch's batches depend on the seed and the epoch alone (`data.sampler`), augmentation on the sample's index as well,
so that a run that is resumed, also on other ranks, goes on as if it had never stopped. What a checkpoint holds besides
the program's own state: the epoch, the samples of it that were seen, the running sums of the epoch, schedulers, EMA and
the generators.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snnpart.errors import ConfigError, LaunchError
from snnpart.runtime.checkpoint import Checkpointer, undisturbed
from snnpart.vision import build
from snnpart.vision.artifact import export, unusable
from snnpart.vision.config import TrainingConfig
from snnpart.vision.data.checks import check_all_labels, check_not_empty
from snnpart.vision.data.loader import Batch
from snnpart.vision.data.sources import Split
from snnpart.vision.ema import Average
from snnpart.vision.evaluation import score
from snnpart.vision.logs import Log, Steps, open_log
from snnpart.vision.metrics import peak_bytes
from snnpart.vision.mixup import Mixup
from snnpart.vision.session import Session, class_count, opened

STEPS_BETWEEN_CHECKS = 50
"""On a GPU the loss is read so seldom, because reading waits for the step."""


def train(config: TrainingConfig) -> dict[str, Any]:
    """Train on the ranks torchrun started; without it, on this process.

    Returns:
        on every rank, the last epoch's metrics: step, epoch, train_loss, validation_loss, top1, top5,
        images_per_second, peak_bytes.

    Raises:
        ConfigError: the configuration or the data cannot be used. CheckpointError: a checkpoint is damaged.
        LaunchError: the loss is no number; the last checkpoint is named.
    """
    data = build.make_data(config)
    check_not_empty(data.validation, "validation")
    launched: dict[str, Any] = {"optimizer": build.optimizer_factory(config), "clip_grad_norm": config.grad_clip}
    with opened(config, data.training, "training", **launched) as session:
        log = open_log(session.running.ranks, config.log, config.tensorboard)
        session.running.ranks.agree(None if config.export is None else unusable(config.export))
        trainer = Trainer(config, session, data, log)
        try:
            return trainer.run()
        finally:
            trainer.close()
            log.close()


@dataclass
class Position:
    """How far training is. `samples` of the epoch were seen, `skipped` were left out among them; `loss` is the sum over
    those that were seen of their batches' losses."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    skipped: int = 0
    loss: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """One training run on a launched program."""

    def __init__(self, config: TrainingConfig, session: Session, data: Split, log: Log) -> None:
        self.config, self.session, self.data, self.log = config, session, data, log
        self.running = session.running
        self.at = Position()
        self.loss = build.make_loss(config)
        self.classes = class_count(self.running.compiled)
        check_all_labels(data.training, self.classes)
        check_all_labels(data.validation, self.classes)
        self.mixup = Mixup(config.mixup_alpha, self.classes)
        self.average = Average(self.running, config.ema) if config.ema is not None else None
        self.scheduler = build.make_scheduler(config, self.running.optimizer, self._steps_an_epoch())
        self.checkpoints = self._checkpointer()

    def _steps_an_epoch(self) -> int:
        samples = self.session.samples(self.data.training)
        loader = self.session.loader(samples, smallest=1, batches=self.config.accumulate)
        return max(1, len(loader))

    def _checkpointer(self) -> Checkpointer | None:
        if self.config.checkpoint_dir is None:
            return None
        mirrors = {"ema": self.average.values} if self.average is not None else {}
        return Checkpointer(
            self.config.checkpoint_dir, self.running, keep_last=self.config.checkpoint_keep, mirrors=mirrors
        )

    def run(self) -> dict[str, Any]:
        """All epochs that are left."""
        self._resume()
        while self.at.epoch < self.config.epochs and not self._at_end():
            self._epoch()
        if self.checkpoints is not None:
            self.checkpoints.wait()
        if self.config.export is not None:
            with self._averaged():
                export(self.running, self.config.export, self.config.described())
        return self.at.metrics

    def close(self) -> None:
        """Let a checkpoint that is being written be finished."""
        if self.checkpoints is not None:
            self.checkpoints.close()

    def _resume(self) -> None:
        if self.checkpoints is None or self.config.resume == "never":
            return
        path = self.checkpoints.latest() if self.config.resume == "auto" else Path(self.config.resume)
        if path is None:
            return
        self._restore(self.checkpoints.load(path))
        self.log.say(f"resumed from {path}: step {self.at.step}, epoch {self.at.epoch + 1}")

    def _at_end(self) -> bool:
        return self.config.max_steps is not None and self.at.step >= self.config.max_steps

    def _epoch(self) -> None:
        """The rest of the current epoch, then validation and a checkpoint."""
        started, before, at = time.perf_counter(), self.at.samples, self.at
        samples = self.session.samples(self.data.training, at.epoch)
        loader = self.session.loader(
            samples,
            order=(self.config.seed, at.epoch),
            position=at.samples + at.skipped,
            smallest=1,
            batches=self.config.accumulate,
        )
        total = torch.zeros((), dtype=torch.float64)
        name = f"epoch {at.epoch + 1} of {self.config.epochs}"
        with Steps(name, len(loader), self.running.ranks.rank == 0) as progress:
            for batch in self.session.batches(loader, self.classes):
                total = total + self._optimizer_step(batch)
                progress.advance()
                self._checkpoint_within(total)
                if self._at_end():
                    break
        at.loss += self._checked(total)
        seconds = max(self.running.ranks.gather(time.perf_counter() - started))
        self._measure((at.samples - before) / seconds if seconds else 0.0)
        self._advance(whole=at.samples - before == loader.samples_left)

    def _optimizer_step(self, batch: Batch) -> Tensor:
        """Forward, backward and update; the sum of the losses of the samples of all ranks."""
        inputs, targets = self._prepared(batch)
        with one_row_told():
            loss = self.running.train_step(inputs, targets, self._loss_of)
        total = loss.detach().to(torch.float64) * batch.together
        self.at.samples += batch.together
        self.at.skipped += batch.skipped
        self.at.step += 1
        if self.average is not None:
            self.average.update()
        if self.scheduler is not None and self.config.scheduler_interval == "step":
            build.advance(self.scheduler)
        if self.at.step % self._check_interval == 0:
            self._checked(total)
        return total

    def _prepared(self, batch: Batch) -> tuple[Tensor, Any]:
        return self.mixup(batch, (self.config.seed, self.at.epoch), self.running.ranks.at.dp, self.config.input_layout)

    def _loss_of(self, outputs: Any, targets: Any) -> Tensor:
        return self.loss(self.session.logits(outputs), targets)

    @property
    def _check_interval(self) -> int:
        return 1 if self.running.ranks.device.type == "cpu" else STEPS_BETWEEN_CHECKS

    def _checked(self, total: Tensor) -> float:
        """The number; LaunchError when it is none, before anything of it is saved."""
        number = float(total)
        if math.isfinite(number):
            return number
        kept = self.checkpoints.latest() if self.checkpoints is not None else None
        raise LaunchError(
            f"the loss is {number} at step {self.at.step} (epoch {self.at.epoch + 1})",
            fix=f"lower the rate, set grad_clip, or use precision = 'fp32'; the last checkpoint is {kept}"
            if kept
            else "lower the rate, set grad_clip, or use precision = 'fp32'",
        )

    def _checkpoint_within(self, total: Tensor) -> None:
        every = self.config.checkpoint_every
        if self.checkpoints is not None and every is not None and self.at.step % every == 0:
            self._save(self.at.loss + self._checked(total))

    def _measure(self, speed: float) -> None:
        """Metrics of the epoch, validation included."""
        at = self.at
        with self._averaged(), undisturbed(self.running):
            found = score(self.session, self.data.validation, self._validation_loss())
        rate = self.running.optimizer.param_groups[0]["lr"] if self.running.optimizer is not None else None
        at.metrics = {
            "event": "epoch",
            "epoch": at.epoch + 1,
            "step": at.step,
            "train_loss": at.loss / max(at.samples, 1),
            "validation_loss": found["loss"],
            "top1": found["top1"],
            "top5": found["top5"],
            "images_per_second": speed,
            "peak_bytes": peak_bytes(self.running.ranks),
            "lr": None if rate is None else float(rate),
        }
        self.log.metrics(at.metrics)

    def _advance(self, whole: bool) -> None:
        """To the start of the next epoch, unless training ended within this one; a checkpoint of it."""
        at = self.at
        if whole:
            at.epoch, at.samples, at.skipped, at.loss = at.epoch + 1, 0, 0, 0.0
            if self.scheduler is not None and self.config.scheduler_interval == "epoch":
                build.advance(self.scheduler, at.metrics["validation_loss"])
        if self.checkpoints is not None:
            self._save(at.loss)

    def _validation_loss(self) -> Any:
        """The training loss without smoothing, on class numbers."""
        return build.make_loss(_Plain(self.config.loss, self.config.loss_kwargs))

    def _averaged(self) -> AbstractContextManager[None]:
        return self.average.applied() if self.average is not None else nullcontext()

    def _save(self, loss: float) -> None:
        assert self.checkpoints is not None
        at = self.at
        extra = {
            "step": at.step,
            "epoch": at.epoch,
            "samples": at.samples,
            "skipped": at.skipped,
            "loss": loss,
            "metrics": at.metrics,
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "seed": self.config.seed,
            "config": self.config.described(),
        }
        self.checkpoints.save(at.step, extra)

    def _restore(self, extra: Mapping[str, Any]) -> None:
        self.at = Position(
            extra["step"],
            extra["epoch"],
            extra["samples"],
            extra.get("skipped", 0),
            extra["loss"],
            dict(extra["metrics"]),
        )
        if self.scheduler is not None and extra["scheduler"] is not None:
            self.scheduler.load_state_dict(extra["scheduler"])


@contextmanager
def one_row_told() -> Iterator[None]:
    """Says what to change where a BatchNorm over [N, C] meets a batch of one row, which has no variance."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            f"a BatchNorm has no more than one value of each channel in this step: {error}",
            fix="choose a batch_size that leaves each rank two samples or more in the last step of an epoch too, "
            'fewer microbatches, or batchnorm = "full" or "sync"',
        ) from error


@dataclass(frozen=True)
class _Plain:
    loss: Any
    loss_kwargs: dict[str, Any]
