"""Neuron state that goes from one window to the next, kept for each microbatch apart.

State of leaves is taken off the stage's modules after a microbatch's forward and put back before that microbatch's next
one, on every rank for the leaves it has. Hand-written state comes with a stage's results and goes in with the inputs,
on the rank that makes it; the other ranks have blanks of its size in its place. Where one of them reads it, it is sent
there as the next call begins (`batches`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from snnpart import facts
from snnpart.errors import ConfigError, LaunchError
from snnpart.facts import Value
from snnpart.frameworks.carried import State, give_state, holds_state, restart, take_state
from snnpart.graph import output_node
from snnpart.program import CompiledProgram
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.stage import BoundStage, Stage
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
        if names and carrier is None:
            raise ConfigError(
                f"the state {names[:5]} of hand-written neurons cannot be carried by a program loaded from disk",
                where=f"network '{compiled.source.name}'",
                fix="compile the network from its source, or use neuron layers of a framework",
            )
        self.carrier = carrier if names else None
        self._stage = stage
        self._leaves: dict[int, dict[str, State]] = {}
        self._slots: dict[int, dict[int, Tensor]] = {}
        self._forms: tuple[tuple[Value, int], ...] = ()
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
        """The hand-written state of a microbatch, with blanks for what other ranks have; empty after a reset."""
        if number not in self._slots:
            return []
        own = self._slots[number]
        return [own[i] if i in own else self._blank(i, self._sizes[number]) for i in range(len(self._forms))]

    def _blank(self, slot: int, size: int) -> Tensor:
        value, batch = self._forms[slot]
        return torch.zeros(value.shape_at(size - batch), dtype=value.dtype, device=self._stage.device)

    def keep(self, number: int, bound: BoundStage, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take the hand-written state from a stage's results; the others."""
        source, keeps = bound.source, bound.program.keeps
        if not source.kept:
            return results
        outputs: Any = output_node(source.graph).args[0]
        self._forms = tuple((facts.need(node, Value), source.batch) for node in outputs[-source.kept :])
        at = len(results) - len(keeps)
        own = self._slots.setdefault(number, {})
        for slot, state in zip(keeps, results[at:], strict=True):
            own[slot] = state.detach().to(self._forms[slot][0].dtype)  # autocast may have chosen another
        return results[:at]

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
        leaves, slots = ({number: dict(own) for number, own in all.items()} for all in (self._leaves, self._slots))
        held = leaves, slots, dict(self._sizes)
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
        own = {("", str(i)): x for i, x in self._slots[number].items()}
        states = restart(own, dict.fromkeys(own, 0.0), mask, "hand-written state")
        self._slots[number] = dict(zip(self._slots[number], states.values(), strict=True))


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
