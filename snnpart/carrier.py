"""Compiles a network with its hand-written state as inputs and outputs, for windows that start where others ended.

Two programs of one signature: the first window starts from reset and returns the state, the next ones also take it.
Both have the plan of the launched program, so they run over the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart.frameworks import preserved, reset_state
from snnpart.graph import SpikeGraph
from snnpart.program import CompiledProgram
from snnpart.seeded import seeded
from snnpart.windows import StateArguments

Compile = Callable[[Any, tuple[int | None, ...], Any, bool, int], CompiledProgram]
"""`(inputs, in_dims, out_dims, training, kept) -> CompiledProgram`: compiles the model as it then is; the last `kept`
outputs stay on the stage that makes them."""


class Wanted(Protocol):
    """What it needs of the options of `parallelize`; `time_steps` is T of a window of a single-step module."""

    @property
    def time_steps(self) -> int | None: ...
    @property
    def out_dims(self) -> Any: ...
    @property
    def reset(self) -> Callable[[nn.Module], Any] | None: ...


class StateCarrier:
    """See the module; what the runtime's `Carrier` asks for."""

    def __init__(
        self,
        model: nn.Module,
        source: SpikeGraph,
        compile: Compile,
        options: Wanted,
    ) -> None:
        """`source` is the launched program's network."""
        self._model, self._compile, self._reset = model, compile, options.reset
        times, steps, out_dims = tuple(info.time_dim for info in source.inputs), options.time_steps, options.out_dims
        self._states = StateArguments(source.states, times, steps is not None, steps)
        self._in_dims = tuple(info.batch_dim for info in source.inputs)
        self._out_dims = out_dims if out_dims is None else (*self._each(out_dims, source), *(0 for _ in source.states))
        self._state_dims: tuple[int | None, ...] = ()
        self._example: Any = None

    def _each(self, out_dims: Any, source: SpikeGraph) -> tuple[int | None, ...]:
        return (out_dims,) * len(source.outputs) if isinstance(out_dims, int) else tuple(out_dims)

    def program(self, inputs: Any, states: Sequence[Tensor], training: bool) -> CompiledProgram:
        """The network for these inputs, from reset (no states) or from these states."""
        with self._states.of(self._model):
            dims = (*self._in_dims, *(self._state_dims if states else ()))
            made = self._compile((inputs, tuple(states)), dims, self._out_dims, training, len(self._states.slots))
        if not states:
            self._state_dims = tuple(info.batch_dim for info in made.source.outputs[-len(self._states.slots) :])
            self._example = inputs
        return made

    @cached_property
    def starts_at_zero(self) -> bool:
        """Whether a state of zeros gives what a reset gives, on the inputs of the first window."""
        with self._states.of(self._model), preserved(self._model), torch.no_grad():
            want = self._run(())
            got = self._run(tuple(torch.zeros_like(state) for state in want[1]))
        pairs = zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True)
        return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)

    def _run(self, states: Sequence[Tensor]) -> Any:
        reset_state(self._model, self._reset)
        with seeded(0, self._example):
            return self._model(self._example, states)
