"""The random generators of a rank. On the topology that saved them they go on; on another they begin from the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from snnpart.runtime.running import RunningProgram

_STEP = 7919
"""A prime, so that neighbouring steps and ranks do not share seeds."""


def taken(running: RunningProgram) -> dict[str, Any]:
    """The state of this rank's generators, small and plain."""
    device = running.ranks.device
    state = {"cpu": bytes(torch.get_rng_state().numpy()), "passes": running.stage.passes}
    if device.type == "cuda":
        state["cuda"] = bytes(torch.cuda.get_rng_state(device).numpy())
        if running.stage.generator is not None:
            state["shared"] = bytes(running.stage.generator.get_state().numpy())
    return state


@contextmanager
def undisturbed(running: RunningProgram) -> Iterator[None]:
    """A block (an evaluation, a check) that leaves the generators where they were."""
    before = taken(running)
    try:
        yield
    finally:
        _put(running, before)


def put_back(running: RunningProgram, saved: Sequence[Mapping[str, Any]], world: int, step: int) -> None:
    """This rank's own state where the ranks are as many as they were; otherwise a seed made from the step."""
    ranks = running.ranks
    if world != ranks.mesh.size or (ranks.device.type == "cuda") != ("cuda" in saved[ranks.rank]):
        torch.manual_seed((torch.initial_seed() + _STEP * step) % 2**63)
        running.stage.passes = step
        return
    _put(running, saved[ranks.rank])


def _put(running: RunningProgram, mine: Mapping[str, Any]) -> None:
    torch.set_rng_state(_tensor(mine["cpu"]))
    running.stage.passes = mine["passes"]
    if "cuda" in mine:
        torch.cuda.set_rng_state(_tensor(mine["cuda"]), running.ranks.device)
    if "shared" in mine and running.stage.generator is not None:
        running.stage.generator.set_state(_tensor(mine["shared"]))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
