"""Facts: what is known of a node, typed, in one slot of `node.meta`.

A fact is a frozen dataclass; a node holds at most one of each type. Analyses and decisions write facts, rewrites and
lowering read them. The slot holds an immutable mapping which is replaced on every write, so that copies of a graph
(fx copies `meta` shallowly) never share later writes.

    facts.put(node, Domain("spike", 0, 1))
    facts.get(node, Domain)            # Domain(...) or None
    facts.need(node, Value).shape      # raises VerifyError with the node's name when it is missing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from torch import fx

from snnpart.errors import VerifyError

_SLOT = "snnpart"
_NONE: Mapping[type, Any] = MappingProxyType({})
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Value:
    """Shape and type of a tensor a node produces, at the example batch.

    `slopes[d]` says how dim d grows with the batch: size(n) = shape[d] + slopes[d] * (n - example batch). It is 0 for
    a dim that does not depend on the batch, 1 for the batch dim, T for a merged [T*N] dim.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    slopes: tuple[int, ...]
    stride: tuple[int, ...] = ()
    requires_grad: bool = False

    def shape_at(self, change: int) -> tuple[int, ...]:
        """The shape when the batch is `change` samples larger than the example batch (negative: smaller)."""
        return tuple(size + slope * change for size, slope in zip(self.shape, self.slopes, strict=True))

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """The dims whose size depends on the batch."""
        return tuple(dim for dim, slope in enumerate(self.slopes) if slope)


@dataclass(frozen=True, slots=True)
class Values:
    """What a node with several results produces: a nested tuple of `Value`, None and Python constants."""

    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: module path, the user's source line, and the pass that made it."""

    module: str = ""
    file: str = ""
    line: int = 0
    made_by: str = "trace"

    @property
    def place(self) -> str:
        line = f"{self.file}:{self.line}" if self.file else ""
        return ", ".join(part for part in (self.module and f"module '{self.module}'", line) if part)


@dataclass(frozen=True, slots=True)
class State:
    """The node is call number `call` of the neuron layer `module`, whose state the calls hand on in order."""

    module: str
    call: int
    of: int


@dataclass(frozen=True, slots=True)
class TimeRole:
    """Where time is in a value.

    `dim` is the dim that carries T (None: none does). `merged` is True when that dim is [T*N] or [N*T]. `step` is the
    step of a time loop at which the value is made (None: outside any loop). `varies` is False for a value that is the
    same at every step.
    """

    dim: int | None = None
    merged: bool = False
    step: int | None = None
    varies: bool = True


@dataclass(frozen=True, slots=True)
class Domain:
    """Which numbers a value can hold: spike {0,1}, ternary {-1,0,1}, integer [low, high] or real."""

    kind: Literal["spike", "ternary", "integer", "real"]
    low: float = float("-inf")
    high: float = float("inf")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a node costs at the example batch. Times in microseconds, sizes in bytes; backward included apart.

    `launch_us` is what of `forward_us`, and of `backward_us` where there is one, does not shrink with the work.
    """

    flops: float = 0.0
    read: float = 0.0
    written: float = 0.0
    saved: float = 0.0
    backward_flops: float = 0.0
    forward_us: float = 0.0
    backward_us: float = 0.0
    launch_us: float = 0.0

    @property
    def us(self) -> float:
        return self.forward_us + self.backward_us

    def share(self, ranks: int) -> Cost:
        """What an equal share of the work costs one of `ranks` ranks: as many launches, less in each."""

        def time(whole: float) -> float:
            fixed = min(self.launch_us, whole)
            return fixed + (whole - fixed) / ranks

        return Cost(
            flops=self.flops / ranks,
            read=self.read / ranks,
            written=self.written / ranks,
            saved=self.saved / ranks,
            backward_flops=self.backward_flops / ranks,
            forward_us=time(self.forward_us),
            backward_us=time(self.backward_us),
            launch_us=self.launch_us,
        )


@dataclass(frozen=True, slots=True)
class LeafMemory:
    """What a call of a layer that is kept whole holds, in bytes for each byte of its result.

    `own` is made in forward for backward alone, `state` goes when the layer is reset. `forward` and `backward` are the
    most beyond what is kept, the result and the gradients, while the layer runs. `keeps_input`: backward needs the
    input too.
    """

    own: float = 2.0
    state: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    keeps_input: bool = True


@dataclass(frozen=True, slots=True)
class Block:
    """The node belongs to occurrence `index` of the repeated block `name`, at place `position` in it."""

    name: str
    index: int
    position: int


Pieces = tuple[tuple[int, int], ...]
"""Half-open intervals [start, stop) of a global dim that one rank holds, in ascending order."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every tp rank holds the whole value. Its gradient is whole on every rank too."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Sharded:
    """Rank r of the tp axis holds the intervals `pieces[r]` of dim `dim`; the gradient likewise."""

    dim: int
    pieces: tuple[Pieces, ...]

    def __str__(self) -> str:
        return f"S({self.dim})"

    def size(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.pieces[rank])


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum of what the tp ranks hold. Its gradient is whole on every rank."""

    def __str__(self) -> str:
        return "P"


Spread = Replicated | Sharded | Partial


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision for one node on the tp axis: the rule that was chosen, and how its result lies on the ranks.

    `rule` names the row of the sharding table ("column", "row", "shard", "replicate", ...). `inputs[i]` is how the i-th
    input node (fx order, `node.all_input_nodes`) must lie; where the producer's `output` differs, a collective is put
    between. `partial_gradients` lists the inputs (by index) whose gradient each rank has only in part.
    """

    rule: str
    output: Spread
    inputs: tuple[Spread, ...] = ()
    partial_gradients: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """The pipeline stage that runs the node."""

    index: int


@dataclass(frozen=True, slots=True)
class Copy:
    """The node reads a copy of a parameter that several stages hold; `key` tells the copies apart in `Plan.stages`."""

    key: str


@dataclass(frozen=True, slots=True)
class Gathers:
    """FSDP2 units (`Plan.units`) of whose parameters the node is the first reader, and of which the last."""

    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The node's saved values are dropped after forward and made again in backward, together with its region's."""

    region: int


def get(node: fx.Node, kind: type[F]) -> F | None:
    """The node's fact of this type, or None."""
    return node.meta.get(_SLOT, _NONE).get(kind)


def need(node: fx.Node, kind: type[F]) -> F:
    """The node's fact of this type; VerifyError when no pass has written it."""
    fact = get(node, kind)
    if fact is None:
        raise VerifyError(
            f"the fact {kind.__name__} is missing",
            where=f"node %{node.name}",
            fix=f"run the pass that writes {kind.__name__} before",
        )
    return fact


def put(node: fx.Node, *new: Any) -> None:
    """Write facts on the node, each replacing the one of its type."""
    node.meta[_SLOT] = MappingProxyType({**node.meta.get(_SLOT, _NONE), **{type(fact): fact for fact in new}})


def drop(node: fx.Node, kind: type) -> None:
    """Forget the node's fact of this type."""
    node.meta[_SLOT] = MappingProxyType({k: v for k, v in node.meta.get(_SLOT, _NONE).items() if k is not kind})


def every(node: fx.Node) -> Mapping[type, Any]:
    """All facts of the node, by type."""
    held: Mapping[type, Any] = node.meta.get(_SLOT, _NONE)
    return held


def origin(node: fx.Node) -> Origin:
    """The node's origin, an empty one when unknown."""
    return get(node, Origin) or Origin()


def place(node: fx.Node) -> str:
    """`node %name (module 'path', file:line)`, for messages."""
    known = origin(node).place
    return f"node %{node.name}" + (f" ({known})" if known else "")
