"""`FusedNeuron`: a norm, all steps of a neuron, and the addition behind it, as one operation of a stage graph.

The node holds what it replaces as a graph of its own, the *region*, which defines what it computes: whoever runs the
node without a kernel runs the region. A region is a chain

    [ops.batch_norm] -> [views] -> a neuron layer that takes all steps, or a loop -> [views] -> [add]
    [ops_time.batch_norm_steps] -> ...
    [ops.batch_norm_copies] -> [unsqueeze] -> expand -> ...

with one result; its views only merge or split the two leading dims, [T, N, ...] and [T*N, ...]. A layer may have the
samples first instead, [N, T, ...] or [N*T, ...] (`scan_order`); a loop has them so between two exchanges of samples and
steps, which are part of the region (`is_turned`). What is used of several results stands behind the scan
(`result_nodes`). In the last form x is the same at every step, and only one copy of it is there. `parts` says which
node is which. Its placeholders are the values that the node is called with, in order; leaves are called by their path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from snnpart import facts, ops
from snnpart.errors import LaunchError
from snnpart.facts import Value
from snnpart.graph import output_node
from snnpart.neuron_step import NeuronStep
from snnpart.ops_time import Loop, Nested, batch_norm_repeated, batch_norm_steps

NORMS = (ops.batch_norm, ops.batch_norm_copies, batch_norm_steps, batch_norm_repeated)
STEPS_APART = 16
"""Of more steps, each with statistics of its own, a kernel would have more sums than registers."""
_VIEWS = (torch.reshape, torch.flatten, torch.unflatten)
CHUNK = 8
"""Steps that stand in a kernel's text one after the other."""
_UNROLLED = 16
WAYS = ("kernel", "compiled", "measured")


@dataclass(frozen=True, eq=False)
class FusedNeuron(Nested):
    """Computes `region`, whose neuron takes `steps` steps, with states rounded to the dtype `state` in a kernel.

    `way` says how it runs on a GPU: by the kernel generated from the neuron's step, by what torch.compile makes of the
    region, or by the fastest of these and the region itself, which is measured once for a machine.
    `recorded` is the neuron's step, where a pass has recorded it; it is not part of the text, and can be made again.
    `over(bind)` is the region as a function over a module's leaves.
    """

    region: fx.Graph
    steps: int
    state: str = "float32"
    recorded: NeuronStep | None = None
    way: str = "kernel"

    def __post_init__(self) -> None:
        ops.name_target(self, "fused_neuron", __name__)

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        return (self.region,)

    def over(self, bind: Callable[[fx.Graph], Callable[..., tuple[Any, ...]]]) -> Callable[..., Tensor]:
        """The region as a function whose neuron layers are those `bind` knows."""
        run = bind(self.region)

        def call(*args: Any) -> Tensor:
            found: Tensor = run(*args)[0]
            return found

        return call

    def __call__(self, *args: Any) -> Tensor:
        raise LaunchError("a fused neuron was called outside its network", fix="run the graph through Body.bind")


@dataclass(frozen=True)
class Parts:
    """Which node of a region is which. `x` and `residual` are placeholders; `result` says which result of the scan is
    taken (None: the one that it has); `stacked`: the region's result has as many dims as what the scan goes through.

    `shared`: x has no steps, it is the same at each.
    """

    x: fx.Node
    norm: fx.Node | None
    scan: fx.Node
    result: int | None
    residual: fx.Node | None
    stacked: bool
    shared: bool


def parts(region: fx.Graph) -> Parts:
    """The parts of a region."""
    (end,) = output_node(region).all_input_nodes
    chain = [node for node in region.nodes if node.op not in ("placeholder", "output")]
    norm = next((node for node in chain if node.target in NORMS), None)
    scan = next(node for node in chain if node.op == "call_module" or isinstance(node.target, Loop))
    taken = [node for node in chain if node.target is getitem and node.args[0] is scan]
    add = end if end.target is torch.add else None
    sequence = scan_input(scan)
    return Parts(
        shared=any(is_expansion(node) for node in chain),
        x=_back_to(sequence if norm is None else norm.args[0]),
        norm=norm,
        scan=scan,
        result=int(taken[0].args[1]) if len(taken) == 1 else None,  # type: ignore[arg-type]
        residual=next((n for n in add.all_input_nodes if n.op == "placeholder"), None) if add is not None else None,
        stacked=len(facts.need(end, Value).shape) == len(facts.need(sequence, Value).shape),
    )


def input_place(target: FusedNeuron) -> int:
    """Which of the values that a fused neuron is called with is x, the one that it keeps for backward."""
    places = [node for node in target.region.nodes if node.op == "placeholder"]
    return places.index(parts(target.region).x)


def chunk_of(steps: int) -> int:
    """How many of a neuron's steps a kernel computes before it keeps the states: `CHUNK` or fewer that divide them, or
    all where that would be few."""
    if steps <= CHUNK:
        return steps
    best = max(k for k in range(1, CHUNK + 1) if steps % k == 0)
    return steps if best < 4 and steps <= _UNROLLED else best


def kept_states(target: FusedNeuron, made: Value) -> float:
    """Bytes of the states that the kernel of a node with this result keeps for backward."""
    norm = parts(target.region).norm
    if target.recorded is None or target.way == "compiled" or (norm is not None and norm.target is batch_norm_steps):
        return 0.0
    chunks = target.steps // chunk_of(target.steps)
    computed = torch.float64 if made.dtype is torch.float64 else torch.float32
    dtype = computed if target.state == "float32" else getattr(torch, target.state)
    return (chunks - 1) * target.recorded.states * made.numel / target.steps * float(dtype.itemsize)


def scan_input(scan: fx.Node) -> fx.Node:
    """What the steps are computed of: the sequence, or the value with samples first that is turned into it."""
    sequence = sequence_of(scan)
    return sequence.args[0] if is_turned(scan) else sequence  # type: ignore[return-value]


def sequence_of(scan: fx.Node) -> fx.Node:
    """The sequence that a neuron layer or a loop goes through."""
    found: Any = scan.args[0] if scan.op == "call_module" else scan.args[0][0]  # type: ignore[index]
    return found  # type: ignore[no-any-return]


def is_turned(scan: fx.Node) -> bool:
    """Whether a loop goes through [N, T, ...] turned to [T, N, ...], and its one result is turned back."""
    if not isinstance(scan.target, Loop) or len(scan.args[0]) != 1 or len(scan.users) != 1:  # type: ignore[arg-type]
        return False
    (taken,) = scan.users
    return _turns(sequence_of(scan)) and len(taken.users) == 1 and _turns(next(iter(taken.users)))


def _turns(node: fx.Node) -> bool:
    """Whether a node exchanges the two leading dims."""
    return node.target in (torch.movedim, torch.transpose) and node.args[1:] in ((0, 1), (1, 0)) and not node.kwargs


def result_nodes(scan: fx.Node) -> list[fx.Node] | None:
    """The nodes from a scan to the one sequence that is used of it: itself, or the result that is taken of several, or
    each step's result and their stack; None where more is used."""
    if facts.get(scan, Value) is not None:
        return [scan]
    users = list(scan.users)
    if len(users) == 1 and users[0].target is getitem and (users[0].args[1] == 0 or isinstance(scan.target, Loop)):
        return [scan, users[0], *(users[0].users if is_turned(scan) else ())]
    stacks = list(dict.fromkeys(reader for user in users for reader in user.users))
    return [scan, *users, stacks[0]] if len(stacks) == 1 and _joins(stacks[0], users) else None


def _joins(node: fx.Node, steps: Sequence[fx.Node]) -> bool:
    """Whether a node stacks all results of a call, in order, which these nodes take."""
    if node.target is not torch.stack or len(node.args) != 2 or node.args[1] != 0 or node.kwargs:
        return False
    joined: Any = node.args[0]
    return set(joined) == set(steps) and [item.args[1] for item in joined] == list(range(len(steps)))


def _back_to(node: Any) -> fx.Node:
    """The placeholder that a chain of views begins at."""
    while node.op != "placeholder":
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def splits_time(node: Any) -> bool:
    """Whether a node is a view that only merges or splits the two leading dims."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target not in _VIEWS:
        return False
    given = facts.get(node.args[0], Value) if isinstance(node.args[0], fx.Node) else None
    made = facts.get(node, Value)
    if given is None or made is None or abs(len(given.shape) - len(made.shape)) > 1:
        return False
    short, long = sorted((given.shape, made.shape), key=len)
    if len(short) == len(long):
        return short == long
    return short[0] == long[0] * long[1] and short[1:] == long[2:]


def is_expansion(node: Any) -> bool:
    """Whether a node repeats one step [1, N, ...] over all of them without a copy."""
    if not isinstance(node, fx.Node) or node.target != "expand" or node.op != "call_method":
        return False
    given, made = (facts.get(item, Value) for item in (node.args[0], node))  # type: ignore[arg-type]
    return given is not None and made is not None and given.shape[:1] == (1,) and given.shape[1:] == made.shape[1:]
