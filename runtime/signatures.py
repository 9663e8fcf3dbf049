"""Which graph a microbatch runs on: the launched one, or one compiled later for another signature.

A signature is what a trace takes as fixed: the sizes of all dims but the batch, the dtypes, and the mode where the
network branches on it. Another signature (another T, another image size) is compiled once by `specialise`, with the
plan of the launched program, and bound over the same tensors. So is a batch size at which a comparison in the user's
code (`if x.shape[0] > 1`) comes out otherwise than the graph takes it. The number kept is bounded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snnpart.errors import ConfigError
from snnpart.graph import SpikeGraph
from snnpart.program import CompiledProgram
from snnpart.runtime.carry import Carrier
from snnpart.runtime.microbatch import batch_size, replace_tensors
from snnpart.runtime.stage import BoundStage, Stage

Specialise = Callable[[Any, bool], CompiledProgram]
Signature = tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], bool | None, int | None]
"""Sizes and dtypes (-1: any batch size), the mode where it matters, the batch size where the code compares it."""
KEPT = 8
FAR_MORE = 8
"""Times as many samples as a program was planned for, from which on it is worth a notice."""
Bound = Mapping[int, BoundStage]
_log = logging.getLogger("snnpart")


class Signatures:
    """Bound stage graphs by signature; the launched program's is always kept."""

    def __init__(self, compiled: CompiledProgram, stage: Stage, tp_rank: int, specialise: Specialise | None) -> None:
        self._source, self._stage, self._tp_rank, self._specialise = compiled.source, stage, tp_rank, specialise
        example = [(info.shape, info.dtype) for info in self._source.inputs]
        self._first: Signature = self._key(example, self._source.traced_training)
        self._launched = stage.bind(compiled, tp_rank)
        self._others: OrderedDict[Signature, Bound] = OrderedDict()
        self._carrying: OrderedDict[tuple[Signature, bool], Bound] = OrderedDict()
        self.notices: list[str] = []
        plan = compiled.plan
        self._planned = -(-plan.samples // plan.microbatches) if plan.tp * plan.pp > 1 else 0
        self._compared = False

    def bound(self, inputs: Any, tensors: Sequence[Tensor], training: bool) -> Bound:
        """The graphs of this rank's stages for one microbatch.

        Args:
            inputs: the user's nested inputs of the whole batch, for their structure.
            tensors: the microbatch's tensors.

        Raises:
            ConfigError: the signature is new and there is nothing to compile it with.
        """
        key = self._key([(tuple(x.shape), x.dtype) for x in tensors], training)
        batch = batch_size(tensors, self._source.inputs)
        self._compare_with_plan(batch)
        found = self._of_signature(key, inputs, tensors, training)
        why = _network(found).misfit(batch)
        return self._of_signature((*key[:2], batch), inputs, tensors, training, f": {why}") if why else found

    def _compare_with_plan(self, batch: int) -> None:
        """Say once that decisions were made for far fewer samples: then messages and launches counted for more. Nothing
        is known of a plan that does not say for how many."""
        if self._planned and batch > FAR_MORE * self._planned and not self._compared:
            self._note(
                f"the plan was made for {self._planned} samples at a time, and {batch} come: give parallelize an "
                "example_inputs= of the size of the batches, and no plan= made for fewer: layers are then shared and "
                "stages cut otherwise"
            )
            self._compared = True

    def _of_signature(
        self, key: Signature, inputs: Any, tensors: Sequence[Tensor], training: bool, why: str = ""
    ) -> Bound:
        if key == self._first:
            return self._launched
        if key not in self._others:
            self._others[key] = self._compile(key, replace_tensors(inputs, tensors), training, why)
            if len(self._others) > KEPT:
                self._others.popitem(last=False)
        self._others.move_to_end(key)
        return self._others[key]

    def carrying(
        self, inputs: Any, tensors: Sequence[Tensor], states: Sequence[Tensor], training: bool, carrier: Carrier
    ) -> Bound:
        """The graphs that take the hand-written state (none: they start from reset) and return it with the outputs."""
        signature = self._key([(tuple(x.shape), x.dtype) for x in tensors], training)
        key, batch = (signature, bool(states)), batch_size(tensors, self._source.inputs)
        self._compare_with_plan(batch)
        if key in self._carrying and _network(self._carrying[key]).misfit(batch):
            key = ((*signature[:2], batch), bool(states))
        if key not in self._carrying:
            made = carrier.program(replace_tensors(inputs, tensors), states, training)
            moved = made.moved_states() if states else ()
            bound = self._stage.bind(made, self._tp_rank)
            self._carrying[key] = {index: replace(one, moved=moved) for index, one in bound.items()}
            if len(self._carrying) > KEPT:
                self._carrying.popitem(last=False)
        self._carrying.move_to_end(key)
        return self._carrying[key]

    def _compile(self, key: Signature, inputs: Any, training: bool, why: str = "") -> Bound:
        if self._specialise is None:
            raise ConfigError(
                f"the program was compiled for {_text(self._first)}, not for {_text(key)}{why}",
                where=f"network '{self._source.name}'",
                fix="give inputs of that signature; a program loaded from disk cannot be traced for another one",
            )
        self._note(f"compiled again for {_text(key)}{why}")
        return self._stage.bind(self._specialise(inputs, training), self._tp_rank)

    def _note(self, text: str) -> None:
        self.notices.append(text)
        _log.info(text)

    def _key(self, inputs: Sequence[tuple[tuple[int, ...], torch.dtype]], training: bool) -> Signature:
        return _signature(self._source, inputs), training if self._source.training_specialised else None, None


def _network(bound: Bound) -> SpikeGraph:
    """What a rank's graphs were lowered from."""
    return next(iter(bound.values())).source


def _signature(source: SpikeGraph, inputs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Any:
    """Shapes with -1 at the batch dim, unless the batch itself is fixed."""
    sizes = []
    for info, (shape, dtype) in zip(source.inputs, inputs, strict=True):
        free = None if source.batch_fixed else info.batch_dim
        sizes.append((tuple(-1 if dim == free else size for dim, size in enumerate(shape)), dtype))
    return tuple(sizes)


def _text(key: Signature) -> str:
    shapes, training, batch = key
    mode = "" if training is None else ", training mode" if training else ", eval mode"
    inputs = ", ".join(f"{str(d).removeprefix('torch.')}{[('N' if n < 0 else n) for n in s]}" for s, d in shapes)
    size = "" if batch is None else f", a batch of {batch}"
    return (inputs + mode + size).replace("'", "")
