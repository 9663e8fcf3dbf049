"""From the words of a configuration to objects: model, data, optimizer, scheduler, loss.

A word is the name of something built in, or an import path, `package.module:name` or `package.module.name`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from snnpart.config import import_object
from snnpart.errors import ConfigError
from snnpart.frameworks.factories import prepare_factory
from snnpart.vision.config import RunConfig, TrainingConfig
from snnpart.vision.data.sources import SOURCES, Split, as_split
from snnpart.vision.recipes import RECIPES

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
LOSSES: Mapping[str, Callable[..., Any]] = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}
_RATE = 1e-3


def find(field: str, word: Any, named: Mapping[str, Any]) -> Any:
    """What a field's word means; ConfigError says what the field can be."""
    if not isinstance(word, str):
        return word
    if word in named:
        return named[word]
    path = word if ":" in word or "." not in word else ":".join(word.rsplit(".", 1))
    if ":" not in path:
        raise ConfigError(f"{field} = {word!r} is not known", fix="or give package.module:name", choices=sorted(named))
    return import_object(path)


def called(field: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The function's result; what it refuses is said with the field's name, and a wrong keyword with the right ones."""
    try:
        return function(*arguments, **keywords)
    except TypeError as error:
        raise ConfigError(f"{field}: {error}", choices=_parameters(function)) from error
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from error


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def make_model(config: RunConfig) -> nn.Module:
    """The module of `model`, the same weights on every rank for one seed.

    Raises:
        ConfigError: no such factory, it fails, or what it gives is no module.
    """
    target = find("model", config.model, RECIPES)
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        raise ConfigError(f"model = {config.model!r} is a {type(target).__name__}, not a factory of a module")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        made = called("model", target, **prepare_factory(target, config.model_kwargs))
    if not isinstance(made, nn.Module):
        raise ConfigError(f"model = {config.model!r} gives a {type(made).__name__}, not a torch.nn.Module")
    return made


def make_data(config: RunConfig) -> Split:
    """The training and validation samples of `dataset`."""
    source = find("dataset", config.dataset, SOURCES)
    return as_split(called("dataset", source, **config.dataset_kwargs) if callable(source) else source)


def make_loss(config: Any) -> Callable[..., torch.Tensor]:
    """`loss(logits, targets)`, the mean over samples: an object of a class, or a function with `loss_kwargs`."""
    found = find("loss", config.loss, LOSSES)
    keywords = dict(config.loss_kwargs)
    if getattr(config, "label_smoothing", 0.0):
        keywords["label_smoothing"] = config.label_smoothing
    if isinstance(found, type):
        made: Callable[..., torch.Tensor] = called("loss", found, **keywords)
        return made
    return partial(found, **keywords)


def optimizer_factory(config: TrainingConfig) -> Callable[..., torch.optim.Optimizer]:
    """`params -> Optimizer`, which each rank calls for its own parameters."""
    found = find("optimizer", config.optimizer, OPTIMIZERS)
    keywords = {"lr": _RATE, **config.optimizer_kwargs}

    def make(params: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = called("optimizer", found, params, **keywords)
        return made

    return make


def make_scheduler(
    config: TrainingConfig, optimizer: torch.optim.Optimizer | None, steps_an_epoch: int
) -> LRScheduler | None:
    """The scheduler over epochs or steps, after a linear warm-up; None without one, or without an optimizer here."""
    if optimizer is None or (config.scheduler is None and not config.warmup):
        return None
    ticks = config.epochs * (steps_an_epoch if config.scheduler_interval == "step" else 1)
    main = _main_schedule(config, optimizer, max(1, ticks - config.warmup))
    if isinstance(main, ReduceLROnPlateau) and (config.warmup or config.scheduler_interval == "step"):
        raise ConfigError(
            "ReduceLROnPlateau follows the validation loss", fix="leave scheduler_interval and warmup out"
        )
    if not config.warmup:
        return main
    rise = LinearLR(optimizer, start_factor=1 / (config.warmup + 1), total_iters=config.warmup)
    return rise if main is None else SequentialLR(optimizer, [rise, main], milestones=[config.warmup])


def advance(scheduler: LRScheduler, validation_loss: float = math.nan) -> None:
    """One tick. ConfigError where the schedule has no more, as one that was resumed for more epochs."""
    try:
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(validation_loss)
        else:
            scheduler.step()
    except ValueError as error:
        raise ConfigError(
            f"scheduler: {error}", fix="resume with the epochs and the samples a step that the schedule was made for"
        ) from error


def _main_schedule(config: TrainingConfig, optimizer: torch.optim.Optimizer, ticks: int) -> LRScheduler | None:
    named: dict[str, tuple[Callable[..., LRScheduler], dict[str, Any]]] = {
        "cosine": (CosineAnnealingLR, {"T_max": ticks}),
        "step": (StepLR, {"step_size": max(1, ticks // 3)}),
        "onecycle": (OneCycleLR, {"total_steps": ticks, "max_lr": optimizer.param_groups[0]["lr"]}),
    }
    if config.scheduler is None:
        return None
    function, usual = (
        find("scheduler", config.scheduler, named)
        if config.scheduler in named
        else (find("scheduler", config.scheduler, named), {})
    )
    made: LRScheduler = called("scheduler", function, optimizer, **{**usual, **config.scheduler_kwargs})
    return made
