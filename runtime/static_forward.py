"""One evaluation over tensors that stay where they are; see `captures`.

The user's output structure is put together outside; what is captured are the flat outputs, on every rank of the
pipeline. Their shapes are agreed on in the first run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snnpart.runtime import microbatch
from snnpart.runtime.captures import StaticPass
from snnpart.runtime.engine import Engine, source_of
from snnpart.runtime.feeds import Feed
from snnpart.runtime.outputs import Kinds, kinds_of, share


class StaticForward(StaticPass):
    """The outputs of the network in eval mode for batches of one kind."""

    def __init__(self, engine: Engine, inputs: Any) -> None:
        super().__init__(engine)
        self._feed = Feed(inputs, engine.ranks.device)
        self._feed.fill(inputs)
        self._parts = engine.batches.parts(self._feed.data, None, False)
        self._kinds: Kinds | None = None

    @property
    def sizes(self) -> list[int]:
        return [part.size for part in self._parts]

    def fill(self, inputs: Any) -> None:
        """The batch of the next evaluation."""
        self._feed.fill(inputs)

    def _body(self) -> tuple[list[Tensor], Tensor]:
        """Flat outputs, and a number above 0 if inputs of a rank hold NaN or Inf."""
        engine = self._engine
        engine.stage.module.train(False)
        pipeline = engine.pipeline(self._parts)
        with torch.no_grad():
            engine.run(pipeline)
        engine.parallel.rest()
        made = [pipeline.outputs[i] for i in sorted(pipeline.outputs)]
        merged = microbatch.merge(made, source_of(self._parts[0]), self.sizes) if made else []
        if self._kinds is None:
            with engine.heartbeat.guard("sharing outputs", engine.stage.place):
                self._kinds = kinds_of(merged, engine.ranks, engine.last)
        bad = engine.bad_inputs(self._parts)
        with engine.heartbeat.guard("sharing outputs", engine.stage.place):
            if engine.ranks.world.group is not None:
                dist.all_reduce(bad, group=engine.ranks.world.group)
            return share(merged, engine.ranks, engine.last, self._kinds), bad

    def structured(self, flat: list[Tensor]) -> Any:
        """The user's output structure."""
        return microbatch.structured(flat, source_of(self._parts[0]))
