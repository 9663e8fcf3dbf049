"""What the vision entry points are told: `TrainingConfig`, `EvaluationConfig`, `PredictionConfig`.

All three share the model, the data, the topology and the device (`RunConfig`). `batch_size` is that of one
data-parallel rank: a step takes batch_size * dp samples, never times tp, pp or T.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from snnpart.errors import ConfigError
from snnpart.layout import check_layout
from snnpart.vision.fields import Configuration, positive

Kwargs = dict[str, Any]


def _table() -> Any:
    return field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Configuration):
    """Model, data, topology and device.

    Args:
        model: import path of a factory, `package.module:name`, or the name of a recipe (`recipes.RECIPES`); in Python
            also a module. None: what `artifact` names.
        model_kwargs: keywords for the factory.
        dataset: import path of a factory that gives the data (`data.sources`), or the name of a built-in source.
        dataset_kwargs: keywords for it.
        input_layout: NCHW, NTCHW or TNCHW: what the model takes. Samples come without N, an NTCHW or TNCHW sample as
            [T, C, H, W]; an image [C, H, W] is repeated over `time_steps`.
        time_steps: T. With NCHW the model computes one step and is called T times.
        readout: what is done with outputs that keep T, [T, N, K]: "mean" or "sum" over T, the "last" step, or "none".
        batch_size: samples a step of each data-parallel rank.
        workers: processes that load data, of each rank.
        on_bad_sample: what a file that cannot be read does: "raise" or "skip".
        tp, pp, dp, microbatches, schedule, plan: as for `snnpart.parallelize`. A plan says those that are not given.
        fsdp_units, fsdp_reshard: with dp=fsdp2, units of a stage (None: the fastest number), and whether parameters are
            sharded again after forward (yes, no, or auto: where that costs nothing).
        batchnorm: whose statistics BatchNorm takes in training: microbatch, full, or sync (over all dp ranks).
        precision: fp32, bf16 or fp16 (autocast; fp16 with a loss scaler).
        numerics: fold: evaluations fold BatchNorm into the layer before it; exact: they do not.
        memory: bytes that a rank may use, or None.
        saved: packed: spikes that layers keep for backward are kept as bits; plain: they are not.
        execution: auto, eager, compile or cuda_graph.
        device: cpu or cuda; None: cuda where there is one.
        seed: of weights, order of samples, augmentation and dropout.
        deterministic: only deterministic algorithms.
        verify: off, trace or full: how much of the program is compared with the model before the run.
        timeout: seconds that a rank waits for another.
    """

    model: str | nn.Module | Callable[..., Any] | None = None
    model_kwargs: Kwargs = _table()
    dataset: str | Callable[..., Any] = "digits"
    dataset_kwargs: Kwargs = _table()
    input_layout: str = "NCHW"
    time_steps: int | None = None
    readout: Literal["mean", "sum", "last", "none"] = "mean"
    batch_size: int = 32
    workers: int = 0
    on_bad_sample: Literal["raise", "skip"] = "raise"
    tp: int = 1
    pp: int = 1
    dp: Literal["ddp", "fsdp2"] = "ddp"
    fsdp_units: int | None = None
    fsdp_reshard: Literal["auto", "yes", "no"] = "auto"
    microbatches: int | None = None
    schedule: str | None = None
    plan: Path | None = None
    batchnorm: Literal["microbatch", "full", "sync"] = "microbatch"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    numerics: Literal["exact", "fold"] = "exact"
    saved: Literal["plain", "packed"] = "plain"
    memory: int | None = None
    execution: Literal["auto", "eager", "compile", "cuda_graph"] = "auto"
    device: str | None = None
    seed: int = 0
    deterministic: bool = False
    verify: Literal["off", "trace", "full"] = "full"
    timeout: float = 600.0

    def check(self) -> None:
        positive(self, "batch_size", "time_steps", "tp", "pp", "microbatches", "memory", "fsdp_units", "timeout")
        positive(self, "workers", "seed", zero=True)
        check_layout(self.input_layout)
        if isinstance(self.model, nn.Module) and self.model_kwargs:
            raise ConfigError("model_kwargs were given with a module that is already made", fix="leave them out")
        if self.device is not None:
            _check_device(self.device)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RunConfig):
    """How a network is trained.

    Args:
        epochs, max_steps: where training ends, whichever comes first.
        optimizer: import path of an optimizer class, or adamw, adam, sgd.
        optimizer_kwargs, scheduler_kwargs, loss_kwargs: keywords for them.
        scheduler: import path of a scheduler class, or cosine, step, onecycle. None: a constant rate. It spans
            `epochs`, also where `max_steps` ends the run before: resumed, it goes on as if it had not ended.
        scheduler_interval: whether it steps once an "epoch" or once an optimizer "step".
        warmup: epochs (or steps) during which the rate rises linearly.
        loss: import path of a loss (its mean over samples), or cross_entropy, mse.
        mixup_alpha: of the Beta distribution of mixup; 0: none.
        label_smoothing: of cross_entropy.
        accumulate: batches whose gradients make one optimizer step: a step takes batch_size * accumulate * dp samples.
        grad_clip: largest norm of all gradients together.
        ema: decay of an exponential average of the weights, which validation and export then use.
        checkpoint_dir: where checkpoints go; None: none are written.
        checkpoint_every: optimizer steps between two; None: one an epoch.
        checkpoint_keep: how many of the last ones are kept.
        resume: "auto" (the last valid checkpoint of checkpoint_dir, if there is one), "never", or a checkpoint's path.
        log: folder of metrics.jsonl, metrics.csv and the plot; None: standard output only.
        tensorboard: also write TensorBoard files into `log`.
        export: folder to write the trained artifact into at the end.
    """

    epochs: int = 1
    max_steps: int | None = None
    optimizer: str | Callable[..., Any] = "adamw"
    optimizer_kwargs: Kwargs = _table()
    scheduler: str | Callable[..., Any] | None = None
    scheduler_kwargs: Kwargs = _table()
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    warmup: int = 0
    loss: str | Callable[..., Any] = "cross_entropy"
    loss_kwargs: Kwargs = _table()
    mixup_alpha: float = 0.0
    label_smoothing: float = 0.0
    accumulate: int = 1
    grad_clip: float | None = None
    ema: float | None = None
    checkpoint_dir: Path | None = None
    checkpoint_every: int | None = None
    checkpoint_keep: int = 3
    resume: str | Path = "auto"
    log: Path | None = None
    tensorboard: bool = False
    export: Path | None = None

    def check(self) -> None:
        super().check()
        positive(self, "epochs", "max_steps", "accumulate", "grad_clip", "checkpoint_every", "checkpoint_keep")
        positive(self, "warmup", "mixup_alpha", zero=True)
        if self.model is None:
            raise ConfigError("model is missing", fix='give a factory, model = "package.module:name", or a recipe')
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing = {self.label_smoothing} is not in [0, 1)")
        if self.label_smoothing and self.loss != "cross_entropy":
            raise ConfigError("label_smoothing goes with loss = 'cross_entropy'", fix="put it into loss_kwargs")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"ema = {self.ema} is not between 0 and 1", fix="0.999 averages about 1000 steps")
        if self.checkpoint_dir is None and (self.checkpoint_every is not None or self.resume not in ("auto", "never")):
            raise ConfigError("checkpoints were asked for, but not where", fix="set checkpoint_dir")
        if self.resume not in ("auto", "never") and not os.path.isdir(self.resume):
            raise ConfigError(f"resume = {str(self.resume)!r} is not a checkpoint's folder", choices=("auto", "never"))
        if self.tensorboard and self.log is None:
            raise ConfigError("tensorboard needs a folder", fix="set log")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(RunConfig):
    """How a network is evaluated.

    Args:
        artifact: a folder that `export` wrote; its model and weights are used.
        checkpoint: or a checkpoint of a training run.
        weights: which of a checkpoint's: "average" (of `ema`) or "raw"; None: the average where it holds one, as
            validation and export take it.
        split: "validation" or "train" part of the data.
        loss, loss_kwargs: as for training.
        log: folder for metrics.jsonl.
    """

    artifact: Path | None = None
    checkpoint: Path | None = None
    weights: Literal["average", "raw"] | None = None
    split: Literal["validation", "train"] = "validation"
    loss: str | Callable[..., Any] = "cross_entropy"
    loss_kwargs: Kwargs = _table()
    log: Path | None = None

    def check(self) -> None:
        super().check()
        check_source(self.artifact, self.checkpoint, self.model, self.weights)


@dataclass(frozen=True, kw_only=True)
class PredictionConfig(RunConfig):
    """What is predicted, and where it goes.

    Args:
        artifact, checkpoint, weights: where the weights are, as for evaluation.
        split: "validation", "train", or "all" samples.
        output: the HDF5 file: `index`, `logits`, and `target` if `targets` is set.
        targets: also write the targets; otherwise they are not read.
        resume: go on with a partial file of the same run.
    """

    output: Path
    artifact: Path | None = None
    checkpoint: Path | None = None
    weights: Literal["average", "raw"] | None = None
    split: Literal["validation", "train", "all"] = "validation"
    targets: bool = False
    resume: bool = True

    def check(self) -> None:
        super().check()
        check_source(self.artifact, self.checkpoint, self.model, self.weights)


def check_source(artifact: Path | None, checkpoint: Path | None, model: Any, weights: str | None) -> None:
    """ConfigError unless exactly one place of the weights is given and a model is known."""
    if (artifact is None) == (checkpoint is None):
        raise ConfigError("give artifact or checkpoint: where the weights are", fix="one of them")
    if artifact is not None and weights is not None:
        raise ConfigError(
            f"weights = {weights!r}, but an artifact holds one set of weights", fix="leave it out, or give a checkpoint"
        )
    if checkpoint is not None and model is None:
        raise ConfigError("a checkpoint holds no model", fix="set model as for the training, or export an artifact")
    for path in (artifact, checkpoint):
        if path is not None and not os.path.isdir(path):
            raise ConfigError(f"{path} is not a folder", fix="give what `export` or training wrote")


def _check_device(text: str) -> None:
    try:
        torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"device = {text!r} is not a device", choices=("cpu", "cuda")) from error
