"""A small compiled program made by hand: two stages, tp=2, one column and one row convolution, a neuron, a linear."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_structure

from snnpart import facts, ops
from snnpart.facts import Cost, Origin, Placement, Replicated, Sharded, Value
from snnpart.footprint import Footprint
from snnpart.graph import Assumption, InputInfo, LeafInfo, OutputInfo, SpikeGraph, StateSlot, TensorInfo
from snnpart.plan import Plan
from snnpart.program import Action, CompiledProgram, PassRecord, Port, StageProgram, TensorSlice

HALVES = (((0, 4),), ((4, 8),))
CHANNELS = Sharded(1, HALVES)


class Neuron(nn.Module):
    """Fires above 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x > 1).to(x)


def value(*shape: int) -> Value:
    return Value(shape, torch.float32, (1, *[0] * (len(shape) - 1)), requires_grad=True)


class Writer:
    """Writes nodes with their facts."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def add(self, node: fx.Node, shape: tuple[int, ...], module: str = "", us: float = 0.0) -> fx.Node:
        facts.put(
            node, value(*shape), Origin(module, "net.py", 7), Cost(flops=us * 1e3, forward_us=us, backward_us=2 * us)
        )
        return node

    def tensor(self, name: str, shape: tuple[int, ...]) -> fx.Node:
        return self.add(self.graph.get_attr(name), shape)

    def call(self, function: object, args: tuple, shape: tuple[int, ...], module: str, us: float = 1.0) -> fx.Node:
        return self.add(self.graph.call_function(function, args), shape, module, us)


def first_stage() -> fx.Graph:
    w = Writer()
    x = w.add(w.graph.placeholder("x"), (2, 3, 8, 8))
    fanned = w.call(ops.grad_all_reduce, (x, "tp"), (2, 3, 8, 8), "block.conv1")
    a = w.call(F.conv2d, (fanned, w.tensor("block.conv1.weight", (4, 3, 3, 3))), (2, 4, 6, 6), "block.conv1", 40.0)
    spikes = w.add(w.graph.call_module("block.lif", (a,)), (2, 4, 6, 6), "block.lif", 5.0)
    b = w.call(F.conv2d, (spikes, w.tensor("block.conv2.weight", (8, 4, 3, 3))), (2, 8, 4, 4), "block.conv2", 60.0)
    whole = w.call(ops.all_reduce, (b, "tp"), (2, 8, 4, 4), "block.conv2")
    w.graph.output((w.call(operator.add, (whole, whole), (2, 8, 4, 4), "block"),))
    return w.graph


def second_stage() -> fx.Graph:
    w = Writer()
    x = w.add(w.graph.placeholder("add"), (2, 8, 4, 4))
    flat = w.call(torch.flatten, (x, 1), (2, 128), "")
    w.graph.output((w.call(F.linear, (flat, w.tensor("head.weight", (10, 128))), (2, 10), "head", 20.0),))
    return w.graph


def source_graph() -> SpikeGraph:
    w = Writer()
    x = w.add(w.graph.placeholder("x"), (2, 3, 8, 8))
    a = w.call(F.conv2d, (x, w.tensor("block.conv1.weight", (8, 3, 3, 3))), (2, 8, 6, 6), "block.conv1", 80.0)
    facts.put(a, Placement("column", CHANNELS, (Replicated(),)))
    spikes = w.add(w.graph.call_module("block.lif", (a,)), (2, 8, 6, 6), "block.lif", 5.0)
    b = w.call(F.conv2d, (spikes, w.tensor("block.conv2.weight", (8, 8, 3, 3))), (2, 8, 4, 4), "block.conv2", 120.0)
    total = w.call(operator.add, (b, b), (2, 8, 4, 4), "block")
    flat = w.call(torch.flatten, (total, 1), (2, 128), "")
    w.graph.output((w.call(F.linear, (flat, w.tensor("head.weight", (10, 128))), (2, 10), "head", 20.0),))
    shapes = {"block.conv1.weight": (8, 3, 3, 3), "block.conv2.weight": (8, 8, 3, 3), "head.weight": (10, 128)}
    tensors = {name: TensorInfo(name, "parameter", torch.zeros(shape)) for name, shape in shapes.items()}
    tensors["spare.weight"] = TensorInfo("spare.weight", "parameter", torch.zeros(4, 4), used=False)
    return SpikeGraph(
        name="Net",
        graph=w.graph,
        tensors=tensors,
        leaves={"block.lif": LeafInfo("block.lif", Neuron(), "hand-written", True)},
        inputs=(InputInfo("x", (2, 3, 8, 8), torch.float32, 0),),
        outputs=(OutputInfo("output", 0),),
        in_spec=tree_structure((0,)),
        out_spec=tree_structure(0),
        batch=2,
        states=(StateSlot("cell", "mem", "None"),),
        assumptions=(Assumption("branch", "self.deep is <True>", "net.py:12"),),
        notes={"replicated head": "10 outputs: <too few> to split", "replicated sort_1": "no rule for sort"},
    )


def slices(tp: int) -> tuple[TensorSlice, ...]:
    def part(name: str, shape: tuple[int, ...], dim: int) -> TensorSlice:
        return TensorSlice(name, "parameter", shape, torch.float32, dim, HALVES[tp], requires_grad=True)

    return part("block.conv1.weight", (8, 3, 3, 3), 0), part("block.conv2.weight", (8, 8, 3, 3), 1)


def compiled() -> CompiledProgram:
    """The program."""
    source = source_graph()
    port = Port("add", value(2, 8, 4, 4))
    head = TensorSlice("head.weight", "parameter", (10, 128), torch.float32, requires_grad=True)
    stages = {}
    for tp in range(2):
        stages[0, tp] = StageProgram(
            stage=0,
            tp_rank=tp,
            graph=first_stage(),
            reads=("x",),
            receives=(),
            sends=(port,),
            tensors=slices(tp),
            leaves=source.leaves,
            forward_us=100.0,
            backward_us=200.0,
            footprint=Footprint(1 << 18, 1 << 18, 1 << 19, 0, 1 << 20, 2),
        )
        stages[1, tp] = StageProgram(
            stage=1,
            tp_rank=tp,
            graph=second_stage(),
            reads=(),
            receives=(port,),
            sends=(),
            tensors=(head,),
            leaves={},
            forward_us=50.0,
            backward_us=100.0,
            footprint=Footprint(1 << 18, 1 << 18, 1 << 19, 0, 0, 1),
        )
    return CompiledProgram(
        source=source,
        plan=Plan(
            tp=2,
            pp=2,
            microbatches=2,
            shards={"block.conv1": "column", "block.lif": "shard", "block.conv2": "row"},
            stages={"block.conv1": 0, "block.lif": 0, "block.conv2": 0, "head": 1},
        ),
        stages=stages,
        schedule={0: (Action(0, "F", 0),), 1: (Action(1, "F", 0),)},
        passes=(PassRecord("canonicalize", 0.0123, 9, 8),),
        notices=("the microbatch count was raised to 2",),
    )
