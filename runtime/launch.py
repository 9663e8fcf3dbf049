"""launch: a compiled program starts on the ranks that torchrun started.

Before the first collective of the program all ranks compare fingerprints; a difference is an error on every rank, not a
hang. A program runs once at a time: a second launch would train two copies of the network under one name.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from snnpart.errors import ConfigError, LaunchError
from snnpart.program import CompiledProgram
from snnpart.runtime.carry import Carrier
from snnpart.runtime.fingerprint import agree_on_values, check_fingerprints
from snnpart.runtime.gradients import holders
from snnpart.runtime.losses import reduction_of
from snnpart.runtime.ranks import Ranks, join
from snnpart.runtime.running import RunningProgram
from snnpart.runtime.settings import Settings
from snnpart.runtime.signatures import Specialise
from snnpart.runtime.values import ResetParameters, Source, take_values
from snnpart.windows import Cut

TIMEOUT = timedelta(minutes=10)
_running: weakref.WeakValueDictionary[int, RunningProgram] = weakref.WeakValueDictionary()


def launch(
    compiled: CompiledProgram,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    clip_grad_norm: float | None = None,
    device: torch.device | str | None = None,
    specialise: Specialise | None = None,
    verify: bool = True,
    expected: Callable[[RunningProgram], Any] | None = None,
    target_dim: int = 0,
    loss_reduction: Any = "mean",
    check_inputs: bool = True,
    timeout: timedelta = TIMEOUT,
    carry: bool = False,
    cut: Cut | None = None,
    carrier: Carrier | None = None,
    execution: str = "auto",
    precision: str = "fp32",
    values: Source | ResetParameters | None = None,
) -> RunningProgram:
    """Start `compiled` on all ranks, dp = world / (tp * pp) times; without torchrun on this process alone. Collective.

    Args:
        optimizer: factory `params -> Optimizer`; with it a train step includes clipping and the update.
        clip_grad_norm: largest norm of all gradients of the network together.
        device: default: "cuda" when the network's tensors are there, else "cpu". CUDA uses torchrun's LOCAL_RANK.
        specialise: `(inputs, training) -> CompiledProgram` for a signature the program was not compiled for.
        verify: call `expected(running)` once everything stands; it checks the program and raises if it is wrong.
        target_dim: where the batch is in targets.
        loss_reduction: what loss_fn does with samples: "mean", "sum", "merged", or a function; see `runtime.losses`.
        check_inputs: look for NaN and Inf in every batch (an eager step on CUDA waits for the answer).
        timeout: how long a rank waits for another before it fails.
        carry: keep neuron state between steps; `reset` drops it.
        cut: train a sequence as windows of time, the state of one, without its graph, the start of the next.
        carrier: compiles the network with its hand-written state as inputs and outputs.
        execution: "eager", "cuda_graph", "compile", or "auto": a CUDA graph where it can be; see `runtime.execution`.
        precision: "fp32" (what the tensors say), or autocast to "bf16" or "fp16" (with a loss scale).
        values: where the tensors come from instead of the model (`runtime.values`).

    Raises:
        LaunchError: the program runs already, the device is not there, or ranks hold different programs.
        ConfigError: tp * pp does not divide the number of ranks, or an argument cannot be meant.
    """
    settings = Settings(
        optimizer=optimizer,
        clip_grad_norm=clip_grad_norm,
        target_dim=target_dim,
        reduction=reduction_of(loss_reduction, compiled.plan.schedule),
        check_loss=verify,
        timeout=timeout,
        check_inputs=check_inputs,
        share_statistics=compiled.plan.batchnorm == "sync",
        carry=carry,
        cut=cut,
        carrier=carrier,
        execution=execution,
        precision=precision,
    )
    return _start(compiled, settings, _device(compiled, device), specialise, values, expected if verify else None)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that `launch` refuses for every program; see there."""
    inspect.signature(launch).bind(None, **options)
    own = {field.name for field in fields(Settings)} - {"reduction"}
    Settings(**{name: value for name, value in options.items() if name in own})
    reduction_of(options.get("loss_reduction", "mean"), "gpipe")
    _asked_device(options.get("device"))


def _start(
    compiled: CompiledProgram,
    settings: Settings,
    device: torch.device,
    specialise: Specialise | None,
    source: Source | ResetParameters | None,
    check: Callable[[RunningProgram], Any] | None,
) -> RunningProgram:
    """Groups, agreement of the ranks on program and weights, and the running program."""
    earlier = _running.get(id(compiled))
    if earlier is not None and not earlier.closed:
        raise LaunchError("the program is running already", fix="close() the running one, or compile a second program")
    among = holders(compiled).values()
    ranks = join(compiled.plan.pp, compiled.plan.tp, device=device, timeout=settings.timeout, among=among)
    with _or_close(ranks):
        check_fingerprints(compiled, ranks)
        values, taken = _values(compiled, ranks, source)
        running = RunningProgram(compiled, ranks, values, settings, specialise)
    if taken:
        running.notice("the ranks held different weights; all start from those of rank 0")
    _running[id(compiled)] = running
    if check is not None:
        with _or_close(running):
            check(running)
    return running


@contextmanager
def _or_close(opened: Ranks | RunningProgram) -> Iterator[None]:
    """A launch that fails leaves no process group, thread or running program: the next one begins anew."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def _values(
    compiled: CompiledProgram, ranks: Ranks, source: Source | ResetParameters | None
) -> tuple[Mapping[str, Tensor], bool]:
    """The tensors that this rank starts from, and whether rank 0's took the place of its own."""
    if source is not None:
        return take_values(compiled, compiled.of_rank(ranks.at.pp, ranks.at.tp), ranks, source), False
    values = {name: info.tensor for name, info in compiled.source.tensors.items()}
    _refuse_blank(values)
    return agree_on_values(values, ranks)


def _refuse_blank(values: Mapping[str, Tensor]) -> None:
    blank = [name for name, x in values.items() if x.is_meta]
    if blank:
        raise ConfigError(
            f"{blank[:5]} are on the meta device: they have no values",
            fix="give launch(values=...): a state_dict, its file, or a function of name, shape and dtype",
        )


def _device(compiled: CompiledProgram, asked: torch.device | str | None) -> torch.device:
    """The device asked for, else the kind of device the network is on; CUDA for a meta model where there is one."""
    given = _asked_device(asked)
    if given is not None:
        return given
    kinds = {info.tensor.device.type for info in compiled.source.tensors.values()}
    nowhere = kinds == {"meta"} and torch.cuda.is_available()
    return torch.device("cuda" if "cuda" in kinds or nowhere else "cpu")


def _asked_device(asked: torch.device | str | None) -> torch.device | None:
    try:
        return None if asked is None else torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={asked!r} is not a device", choices=("cpu", "cuda", "cuda:0")) from error
