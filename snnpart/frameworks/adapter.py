"""Adapter: what snnpart must know of a framework's modules.

One subclass per framework. The base class answers for modules nobody knows: not a leaf, nothing about shapes, time or
channels, real-valued output. Adapters hold no state; every method takes the module.

Words: a *leaf* stays whole in the graph (one `call_module` node); a *neuron* is a leaf whose state is reset before
every window; *multi-step* modules take all T steps in one call.

`infer` says what a call returns without running it: tensors with the right shape, dtype, layout and `requires_grad`,
made on the (fake) device of the arguments. It may run the module on a miniature real input; it is called with the
tracer's recording switched off, and leaves the module as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.facts import Domain

REAL = Domain("real")
SPIKE = Domain("spike", 0.0, 1.0)


class Adapter:
    """What one framework's modules do. Subclasses override what they know; the defaults are safe."""

    name = "torch"
    package = "torch"
    buffers_are_state = False
    """Whether the framework's modules take every buffer they have for their state."""

    def knows(self, module: nn.Module) -> bool:
        """Whether the module's class, or one it derives from, is the framework's."""
        return from_package(module, self.package)

    def is_leaf(self, module: nn.Module) -> bool:
        """Whether the module stays whole in the graph."""
        return self.is_neuron(module)

    def holds_matrix(self, module: nn.Module) -> bool:
        """Whether the leaf holds weight matrices and can be traced through as well, which makes them operations of the
        graph: tp ranks can then share their rows."""
        return False

    def is_neuron(self, module: nn.Module) -> bool:
        """Whether the module computes a layer of spiking (or leaky integrating) neurons."""
        return False

    def finish(self, module: nn.Module) -> None:
        """Make again, on a copy, what the module derives from its tensors and keeps in attributes."""

    def reset(self, module: nn.Module) -> None:
        """Put the module's own state (not its children's) back to its start, without writing into old tensors."""

    def confined(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside the block, what the framework does to all its layers at once reaches those of `model` only."""
        return nullcontext()

    def transient_names(self, module: nn.Module) -> frozenset[str]:
        """Buffers and plain attributes that hold state, or leftovers of a call: copies and saved leaves lack them."""
        return frozenset()

    def infer(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What `module(*args, **kwargs)` returns, as empty tensors; NotImplemented when that is not known."""
        return NotImplemented

    def time_dim(self, module: nn.Module) -> int | None:
        """The dim of the first input that carries T in one call; None: one step a call, or merged with the batch."""
        return None

    def merged_steps(self, module: nn.Module, rows: int) -> int | None:
        """T of a module that takes all steps with the samples merged, [N*T, ...], of `rows` such rows; None: it does
        not."""
        return None

    def is_elementwise(self, module: nn.Module) -> bool:
        """Whether every element apart from the time dim is computed from its own inputs alone (scalars shared)."""
        return False

    def channel_dim(self, module: nn.Module, ndim: int) -> int | None:
        """The dim of the channels in an input of `ndim` dims, when channels do not mix; None: they do, or unknown."""
        return None

    def channel_tensors(self, module: nn.Module) -> dict[str, int] | None:
        """The module's per-channel tensors and the dim that holds the channels; None: cannot be cut by channels."""
        return None

    def output_domain(self, module: nn.Module) -> Domain:
        """Which numbers the first output holds."""
        return REAL

    def flops_per_element(self, module: nn.Module) -> float:
        """Floating-point operations a forward needs for one element of one step."""
        return 0.0

    def for_layout(self, module: nn.Module, multi_step: bool) -> None:
        """Put the module, a copy, into the step mode of the layout. No-op where there is only one."""

    def merge_steps(self, module: nn.Module, steps: int) -> None:
        """Tell the module, a copy for which `merged_steps` is known, how many steps each sample has from now on."""

    def one_step(self, module: nn.Module) -> bool:
        """Have the module, a copy that takes all steps in one call, take one [N, ...] and return what that gives, its
        state kept on itself; False where it has no such form."""
        self.for_layout(module, multi_step=False)
        return self.time_dim(module) is None

    def state_names(self, module: nn.Module) -> frozenset[str]:
        """The attributes that hold state between calls; code that reads them after a call cannot be traced."""
        return frozenset()

    def takes_all_state(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments is given all that is carried, so that it reads nothing that the module
        kept of an earlier one."""
        return len(args) + len(kwargs) > 1

    def hook_by_element(self, hook: Callable[[Tensor], Any]) -> bool:
        """Whether a gradient hook of the framework computes every element from the same element alone, and from where
        that stands; zeros stay zeros."""
        return False

    def set_batch(self, module: nn.Module, original: nn.Module, size: int, example: int) -> None:
        """Tell the module, a copy of `original`, that `size` samples come where the original was traced with `example`.

        No-op where the batch size is read from the input.
        """


def from_package(module: nn.Module, package: str) -> bool:
    """Whether the module's class or a base of it is defined in the package."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(module).__mro__)


def defined_in(module: nn.Module, *prefixes: str) -> bool:
    """Whether the module's class or a base of it is defined in a Python module under one of the prefixes."""
    return any(kind.__module__.startswith(prefixes) for kind in type(module).__mro__)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def needs_grad(module: nn.Module, *values: Any) -> bool:
    """Whether a result computed from the module's parameters and `values` carries a gradient now."""
    if not torch.is_grad_enabled():
        return False
    return any(p.requires_grad for p in module.parameters()) or any(t.requires_grad for t in tensors_in(values))


def empty(
    like: Tensor, shape: tuple[int, ...] | None = None, *, dtype: torch.dtype | None = None, grad: bool
) -> Tensor:
    """A new tensor on the device of `like`; with `grad` it is the result of an operation, as a module's output is.

    Without `shape` it has the shape and the memory order of `like`.
    """
    dtype = dtype or like.dtype
    if shape is None:
        made = torch.empty_like(like, dtype=dtype, requires_grad=False)
    else:
        made = like.new_empty(shape, dtype=dtype, requires_grad=False)
    return made.requires_grad_().clone() if grad and dtype.is_floating_point else made
