"""Long sequences as windows of time: where they are cut, and neuron state that goes from one window to the next.

`detach_every=k` trains a sequence of T steps as windows of k: forward and backward of each window on its own, the state
of one, without its graph, being the start of the next (truncated backpropagation through time). `state="carry"` keeps
the state between calls in the same way.

State that framework neurons keep on themselves is taken from and given to the leaves by the runtime. State of
hand-written neurons is part of the graph; `StateArguments` gives the user's module a forward that takes it as arguments
and returns it with the result, so that a trace of it has it as inputs and outputs:

    forward(inputs, states) -> (result, states after)          `states` empty: from reset

State that forward makes anew for itself (a membrane in a local variable) does not go over to the next window; what such
a network computes in windows is another thing, and `check_windows` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart.errors import ConfigError
from snnpart.frameworks import preserved, reset_state
from snnpart.graph import StateSlot

Dims = Sequence[int | None]
_TOLERANCE = {torch.float64: 1e-9}
_LOOSE = 1e-5


@dataclass(frozen=True)
class Cut:
    """How a call is cut into windows of `every` steps.

    `time_dims` are those of the tensor inputs, in order. `steps` is T of a single-step module (`time_steps`); inputs
    without a time dim are then given to every window.
    """

    every: int
    time_dims: tuple[int | None, ...]
    steps: int | None = None

    def length(self, tensors: Sequence[Tensor]) -> int:
        """T of these inputs; ConfigError when it cannot be cut."""
        sizes = {x.shape[d] for x, d in zip(tensors, self.time_dims, strict=True) if d is not None}
        if len(sizes) > 1:
            raise ConfigError(f"the inputs have {sorted(sizes)} steps", fix="give all of them the same T")
        if sizes:
            return sizes.pop()
        if self.steps is None:
            raise ConfigError(
                "detach_every cuts along time, but no input has a time dim", fix='say where it is: input_layout="TNCHW"'
            )
        if self.steps % self.every:
            raise ConfigError(
                f"detach_every={self.every} does not divide time_steps={self.steps}, and the inputs have no time dim",
                fix="give a divisor",
            )
        return self.steps

    def windows(self, inputs: Any) -> Iterator[tuple[Any, float]]:
        """The inputs of each window and its share of all steps."""
        leaves, spec = pytree.tree_flatten(inputs)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        total = self.length([leaves[i] for i in places])
        bounds = [*range(0, total, self.every), total]
        for start, stop in pairwise(bounds):
            now = list(leaves)
            for place, dim in zip(places, self.time_dims, strict=True):
                now[place] = leaves[place] if dim is None else leaves[place].narrow(dim, start, stop - start)
            yield pytree.tree_unflatten(now, spec), (stop - start) / total


@dataclass(frozen=True)
class StateArguments:
    """The hand-written state of a network as arguments and results of its forward.

    With `steps` the module computes one step, and forward calls it so many times with the state of the first.
    """

    slots: tuple[StateSlot, ...]
    time_dims: tuple[int | None, ...]
    single_step: bool
    steps: int | None = None

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model with that forward, under its own names; put back when the block is left."""
        kind = type(model)
        forward = lambda module, inputs, states: self._forward(kind.forward, module, inputs, states)  # noqa: E731
        model.__class__ = type(
            kind.__name__, (kind,), {"forward": _two_arguments(forward), "__module__": kind.__module__}
        )
        try:
            yield model
        finally:
            model.__class__ = kind

    def _forward(self, own: Callable[..., Any], module: nn.Module, inputs: Any, states: Sequence[Tensor]) -> Any:
        for slot, value in zip(self.slots, states, strict=False):
            setattr(module.get_submodule(slot.module), slot.name, value)
        call = lambda now: _call(lambda *args, **kwargs: own(module, *args, **kwargs), now)  # noqa: E731
        result = over_steps(call, inputs, self.time_dims, self.steps) if self.single_step else call(inputs)
        return result, tuple(_kept(module, slot) for slot in self.slots)


def _two_arguments(forward: Callable[..., Any]) -> Callable[..., Any]:
    def with_names(self: nn.Module, inputs: Any, states: Any) -> Any:
        return forward(self, inputs, states)

    return with_names


def _kept(module: nn.Module, slot: StateSlot) -> Tensor:
    value = getattr(module.get_submodule(slot.module), slot.name, None)
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"after forward it holds a {type(value).__name__}, not a tensor, and cannot go over to the next window",
            where=f"module '{slot.module}', attribute '{slot.name}'",
            fix="keep state that is carried in tensors, or leave state= and detach_every= out",
        )
    return value


def _call(function: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return function(**inputs)
    return function(*inputs) if isinstance(inputs, tuple) else function(inputs)


def over_steps(call: Callable[[Any], Any], inputs: Any, time_dims: Dims, steps: int | None) -> Any:
    """A single-step module over all steps: its outputs stacked over time at dim 0."""
    leaves, spec = pytree.tree_flatten(inputs)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    timed = {i: d for i, d in zip(places, time_dims, strict=True) if d is not None}
    count = next((leaves[i].shape[d] for i, d in timed.items()), steps)
    assert count is not None  # `Cut.length` has seen to it
    outs = []
    for t in range(count):
        now = [leaf.select(timed[i], t) if i in timed else leaf for i, leaf in enumerate(leaves)]
        outs.append(call(pytree.tree_unflatten(now, spec)))
    return pytree.tree_map(lambda *xs: torch.stack(xs) if isinstance(xs[0], Tensor) else xs[-1], *outs)


def joined(results: Sequence[Any]) -> Any:
    """The results of a single-step module's windows, which have time at dim 0, as one."""
    return pytree.tree_map(lambda *xs: torch.cat(xs) if isinstance(xs[0], Tensor) else xs[-1], *results)


def check_windows(model: nn.Module, inputs: Any, cut: Cut, reset: Callable[[nn.Module], Any] | None) -> None:
    """ConfigError when the model, called window after window, does not compute what it computes in one call."""
    first = next(cut.windows(inputs))[1]
    if first == 1.0:
        return
    with preserved(model), torch.no_grad():
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            reset_state(model, reset)
            whole = _tensors(_run(model, inputs, cut, cut.steps))
            reset_state(model, reset)
            parts = [(_tensors(_run(model, now, cut, cut.every)), share) for now, share in cut.windows(inputs)]
        finally:
            for module, mode in modes:
                module.training = mode
    for at, want in enumerate(whole):
        if not _agrees(want, [(part[at], share) for part, share in parts]):
            raise ConfigError(
                f"output {at} of the whole sequence is not made of those of windows of {cut.every} steps: state does "
                f"not go from one call to the next",
                where=f"network '{type(model).__name__}'",
                fix="keep neuron state on the modules (not in forward's own variables), or leave detach_every out",
            )


def _run(model: nn.Module, inputs: Any, cut: Cut, steps: int | None) -> Any:
    call = lambda now: _call(model, now)  # noqa: E731
    return call(inputs) if cut.steps is None else over_steps(call, inputs, cut.time_dims, steps)


def _tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]


def _agrees(whole: Tensor, parts: Sequence[tuple[Tensor, float]]) -> bool:
    """The whole is the windows' results one after the other in some dim, or their mean, sum, or last."""
    values = [value for value, _ in parts]
    candidates: list[Tensor] = []
    for dim in range(whole.dim()):
        rest = {(*v.shape[:dim], *v.shape[dim + 1 :]) for v in (whole, *values) if v.dim() == whole.dim()}
        if len(rest) == 1 and sum(v.shape[dim] for v in values) == whole.shape[dim]:
            candidates.append(torch.cat(values, dim))
    if all(value.shape == whole.shape for value in values):
        candidates += [values[-1], torch.stack(values).sum(0)]
        if whole.is_floating_point():
            candidates.append(torch.stack([value * share for value, share in parts]).sum(0))
    limit = _TOLERANCE.get(whole.dtype, _LOOSE) * max(1.0, float(whole.abs().max()) if whole.numel() else 0.0)
    return any(bool(((made - whole).abs() <= limit).all()) for made in candidates)
