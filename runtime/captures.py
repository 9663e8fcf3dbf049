"""CUDA graphs of a launched program: which pass is captured, on which stream, and what happens when a capture fails.

All passes of a program that may be captured run on one stream, captured or not: the autograd nodes of parameters,
buckets and communicators must know no other one. A pass is captured once it has run `WARM` times; those start NCCL's
communicators, let libraries choose algorithms, and make the optimizer's state.
"""

from __future__ import annotations

import atexit
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from snnpart import compat
from snnpart.runtime.engine import Engine
from snnpart.runtime.heartbeat import DEVICE

WARM = 3
KEPT = 8
"""Passes that are kept, each for one kind of batch."""


class StaticPass(ABC):
    """Work over tensors that stay where they are, so that it can be captured."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        self.runs = 0

    @property
    @abstractmethod
    def sizes(self) -> list[int]:
        """Samples of each microbatch."""

    @abstractmethod
    def _body(self) -> Any:
        """Carry the work out; its result."""

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def run(self) -> Any:
        """Carry the work out without a graph."""
        self.runs += 1
        return self._body()

    def capture(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Record the work; nothing is carried out. Raises what the capture raises."""
        graph = torch.cuda.CUDAGraph()
        if self._engine.stage.generator is not None:
            graph.register_generator_state(self._engine.stage.generator)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = self._body()
        self._graph, self._result = graph, result

    def replay(self) -> Any:
        """Carry out what was recorded; the result's tensors are overwritten by the next replay."""
        assert self._graph is not None
        self._graph.replay()
        return self._result


class Captures:
    """The passes of one program by kind of batch, and their graphs where the device has any."""

    def __init__(self, engine: Engine, notice: Callable[[str], None]) -> None:
        self._engine, self._notice = engine, notice
        cuda = engine.ranks.device.type == "cuda" and engine.settings.execution in ("auto", "cuda_graph")
        self.stream = torch.cuda.Stream(engine.ranks.device) if cuda else None
        self._pool = torch.cuda.graph_pool_handle() if cuda else None
        self._failed = self._full = False
        if cuda and not engine.ranks.captures:
            self._failed = True
            notice("steps run uncaptured: the ranks talk through another backend than NCCL, which no graph can hold")
        self._passes: OrderedDict[Hashable, StaticPass] = OrderedDict()
        _open.add(self)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """A block on the stream of the passes."""
        if self.stream is None:
            yield
            return
        outside = torch.cuda.current_stream()
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            yield
        outside.wait_stream(self.stream)

    def find(self, key: Hashable, make: Callable[[], StaticPass]) -> StaticPass:
        """The pass for this kind of batch."""
        if key not in self._passes:
            if len(self._passes) == KEPT:
                self._say_full()
                self._passes.popitem(last=False)
            self._passes[key] = make()
        self._passes.move_to_end(key)
        return self._passes[key]

    def _say_full(self) -> None:
        if not self._full:
            self._notice(
                f"more than {KEPT} kinds of batches, losses or hyperparameters: the oldest is dropped, and a kind that "
                f"comes less than {WARM} times meanwhile is never captured; keep shapes and the loss function the same"
            )
        self._full = True

    def may_capture(self, one: StaticPass) -> bool:
        """Whether the pass has run often enough here."""
        return self.stream is not None and not self._failed and one.runs >= WARM

    def capture(self, one: StaticPass) -> bool:
        """Capture the pass on every rank where it is not; False, with a notice, when a rank could not. Collective."""
        problem = ""
        if not one.is_captured:
            assert self.stream is not None
            try:
                with self._engine.heartbeat.attempt():
                    one.capture(self.stream, self._pool)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                compat.end_failed_capture(self._engine.ranks.device, self.stream, self._engine.stage.generator)
        with self._engine.heartbeat.guard("agreeing on the capture", self._engine.stage.place):
            everyone = self._engine.ranks.gather(problem)
        found = [(rank, text) for rank, text in enumerate(everyone) if text]
        if found:
            self._give_up(*found[0])
        return not found

    def _give_up(self, rank: int, text: str) -> None:
        """Run uncaptured from now on; what a capture left half done is forgotten, by all ranks alike: who captured
        would else reduce gradients in buckets that the others make anew."""
        self._failed = True
        self._passes.clear()
        self._engine.zero_grad()
        self._engine.stage.reset()
        self._engine.forget()
        self._notice(f"steps run uncaptured: the capture failed on rank {rank} with {text}")

    @property
    def captured(self) -> int:
        """How many passes there are graphs of."""
        return sum(one.is_captured for one in self._passes.values())

    def close(self) -> None:
        """Drop all graphs: NCCL does not end a communicator that a graph still uses, it waits for ever."""
        if self.stream is not None:
            with self._engine.heartbeat.within(f"{DEVICE}, closing"):
                torch.cuda.synchronize(self._engine.ranks.device)
        self._passes.clear()


_open: weakref.WeakSet[Captures] = weakref.WeakSet()
"""Those whose graphs must go before the process does."""


@atexit.register
def _close_all() -> None:
    for captures in list(_open):
        captures.close()
