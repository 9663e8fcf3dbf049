"""Neuron state that goes from one window to the next, kept for each microbatch apart.

State of leaves is taken off the stage's modules after a microbatch's forward and put back before that microbatch's next
one, on every rank for the leaves it has. Hand-written state comes with the outputs and goes in with the inputs; the
outputs are on the last stage, so it needs a network of one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from snnpart.errors import ConfigError, LaunchError
from snnpart.frameworks.carried import State, give_state, holds_state, restart, take_state
from snnpart.program import CompiledProgram
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.stage import Stage
from snnpart.windows import Cut


class Carrier(Protocol):
    """Compiles the network with its hand-written state as inputs and outputs; see `windows.StateArguments`."""

    @property
    def starts_at_zero(self) -> bool:
        """Whether a state of zeros is the state after a reset."""

    def program(self, inputs: Any, states: Sequence[Tensor], training: bool) -> CompiledProgram:
        """The network for these inputs, from reset or from these states."""


class Carry:
    """The state of this rank's stage between windows, by microbatch."""

    def __init__(self, stage: Stage, compiled: CompiledProgram, carrier: Carrier | None) -> None:
        """`carrier` None: the network's hand-written state, if it has any, cannot be carried.

        Raises:
            ConfigError: no module keeps state, or there is hand-written state that cannot be carried here.
        """
        names = [f"{slot.module}.{slot.name}".strip(".") for slot in compiled.source.states]
        if not names and not any(holds_state(leaf.module) for leaf in compiled.source.leaves.values()):
            raise ConfigError(
                "no module keeps state between calls, so there is nothing to carry",
                where=f"network '{compiled.source.name}'",
                fix="keep neuron state on the modules, or hand it in and out as inputs and outputs",
            )
        if names and (compiled.plan.pp > 1 or carrier is None):
            raise ConfigError(
                f"the state {names[:5]} of hand-written neurons is carried in a network of one stage only",
                where=f"network '{compiled.source.name}', pp={compiled.plan.pp}",
                fix="use pp=1 and a program that is not loaded from disk, or neuron layers of a framework",
            )
        self.carrier = carrier if names else None
        self._stage = stage
        self._leaves: dict[int, dict[str, State]] = {}
        self._slots: dict[int, list[Tensor]] = {}
        self._sizes: dict[int, int] = {}

    def clear(self) -> None:
        """Every sequence starts anew."""
        self._leaves.clear()
        self._slots.clear()
        self._sizes = {}

    def expect(self, sizes: Sequence[int]) -> None:
        """ConfigError when there is state of a batch cut into other microbatches."""
        held = self._held_sizes
        if held and list(sizes) != held:
            raise ConfigError(
                f"the state of {sum(held)} samples (microbatches {held}) does not fit a batch of "
                f"{sum(sizes)} (microbatches {list(sizes)})",
                fix="give the same sequences' next window, or reset() first",
            )

    @property
    def _held_sizes(self) -> list[int]:
        """Samples of each microbatch that there is state of."""
        return [self._sizes[number] for number in sorted(self._sizes)]

    def slots(self, number: int) -> list[Tensor]:
        """The hand-written state of a microbatch; empty after a reset."""
        return self._slots.get(number, [])

    def keep_slots(self, number: int, states: Sequence[Tensor]) -> None:
        """Take hand-written state from a microbatch's outputs."""
        self._slots[number] = [state.detach() for state in states]

    def begin(self, number: int, paths: Iterable[str]) -> None:
        """Before a microbatch's forward: its state is put on the (reset) leaves of `paths`."""
        held = self._leaves.get(number, {})
        for path in paths:
            if path in held:
                give_state(self._stage.leaves[path], held[path])

    def end(self, number: int, size: int, paths: Iterable[str]) -> None:
        """After a microbatch's forward, before the leaves are reset."""
        self._leaves.setdefault(number, {}).update({path: take_state(self._stage.leaves[path]) for path in paths})
        self._sizes[number] = size

    def put_aside(self) -> Any:
        """All state, which is then cleared; for `put_back`."""
        held = ({number: dict(leaves) for number, leaves in self._leaves.items()}, dict(self._slots), dict(self._sizes))
        self.clear()
        return held

    def put_back(self, held: Any) -> None:
        """What `put_aside` gave."""
        self._leaves, self._slots, self._sizes = held

    def restart(self, mask: Tensor) -> None:
        """The samples for which `mask` [N] is True start anew.

        Raises:
            ConfigError: the mask does not fit the batch, or a state cannot start anew for some samples.
        """
        held = self._held_sizes
        if not held:
            return
        if mask.dtype is not torch.bool or tuple(mask.shape) != (sum(held),):
            raise ConfigError(
                f"the reset mask is {str(mask.dtype).removeprefix('torch.')}{list(mask.shape)}, the state is of "
                f"{sum(held)} samples",
                fix=f"give a mask bool[{sum(held)}], True where a new sequence starts",
            )
        for number, part in enumerate(mask.to(self._stage.device).split(held)):
            if bool(part.all()):
                self._leaves.pop(number, None)
                self._slots.pop(number, None)
            elif bool(part.any()):
                self._restart_some(number, part)

    def _restart_some(self, number: int, mask: Tensor) -> None:
        fresh = {path: take_state(leaf) for path, leaf in self._stage.leaves.items()}
        self._leaves[number] = {
            path: restart(state, fresh[path], mask, f"module '{path}'")
            for path, state in self._leaves.get(number, {}).items()
        }
        if self.carrier is None or number not in self._slots:
            return
        if not self.carrier.starts_at_zero:
            raise ConfigError(
                "the hand-written state after a reset is not zero, so single samples cannot start anew",
                fix="reset all samples at once",
            )
        zeros = {("", str(i)): 0.0 for i in range(len(self._slots[number]))}
        states = restart(
            {("", str(i)): x for i, x in enumerate(self._slots[number])}, zeros, mask, "hand-written state"
        )
        self._slots[number] = list(states.values())


def agreed_windows(cut: Cut | None, inputs: Any, ranks: Ranks) -> list[tuple[Any, float]]:
    """The windows of a call with their shares of the steps, as many on every rank.

    Raises:
        ConfigError, LaunchError: on every rank, when a rank's inputs cannot be cut, or ranks have other numbers.
    """
    if cut is None:
        return [(inputs, 1.0)]
    problem: Exception | None = None
    found: list[tuple[Any, float]] = []
    try:
        found = list(cut.windows(inputs))
    except Exception as error:
        problem = error
    ranks.agree(problem)
    counts = ranks.gather(len(found))
    if len(set(counts)) > 1:
        raise LaunchError(f"the ranks' sequences have {counts} windows", fix="give every rank the same T in a step")
    return found
