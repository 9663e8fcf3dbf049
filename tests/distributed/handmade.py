"""A small network lowered by hand, so that the runtime is tested apart from the passes.

    x [N, 6] -> a (column) -> batch norm -> spike -> b (row) -> u      | stage 0
    u, mask -> c (column) -> spike -> d (row) -> * gain, halved where mask is False -> y [N, 3]   | stage 1

`mask` is boolean and crosses the cut without a gradient. With tp = 2 the hidden widths 7 and 5 are cut unevenly.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from snnpart import ops
from snnpart.facts import Value
from snnpart.graph import InputInfo, OutputInfo, SpikeGraph, TensorInfo
from snnpart.plan import Plan
from snnpart.program import Action, CompiledProgram, Port, StageProgram, TensorSlice
from tests.neurons import Spike

BATCH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 4)
        self.c, self.d = nn.Linear(4, 5), nn.Linear(5, 3)
        self.gain, self.idle = nn.Parameter(torch.tensor(1.5)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        u = self.b(Spike.apply(self.bn(self.a(x))))
        y = self.d(Spike.apply(self.c(u))) * self.gain
        return torch.where((x.sum(1) > 0).unsqueeze(1), y, y * 0.5)


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def halves(size: int, tp: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """What each tp rank holds of `size` channels, the first ranks more."""
    cuts = [0]
    for rank in range(tp):
        cuts.append(cuts[-1] + size // tp + (rank < size % tp))
    return tuple(((cuts[r], cuts[r + 1]),) for r in range(tp))


SLICED = {"a.weight": 0, "a.bias": 0, "bn.weight": 0, "bn.bias": 0, "bn.running_mean": 0, "bn.running_var": 0}
SLICED |= {"b.weight": 1, "c.weight": 0, "c.bias": 0, "d.weight": 1}


def source_of(net: nn.Module) -> SpikeGraph:
    tensors: dict[str, TensorInfo] = {}
    for name, p in net.named_parameters():
        tensors[name] = TensorInfo(name, "parameter", p, used=not name.startswith("idle"))
    for name, b in net.named_buffers():
        tensors[name] = TensorInfo(name, "buffer", b)
    _, spec = pytree.tree_flatten(torch.zeros(1))
    return SpikeGraph(
        name="handmade",
        graph=fx.Graph(),
        tensors=tensors,
        leaves={},
        inputs=(InputInfo("x", (BATCH, 6), torch.float64, 0),),
        outputs=(OutputInfo("y", 0),),
        in_spec=spec,
        out_spec=spec,
        batch=BATCH,
    )


def compile_by_hand(
    net: nn.Module, *, tp: int = 1, pp: int = 1, microbatches: int = 1, dp: str = "ddp", schedule: str = "1f1b"
) -> CompiledProgram:
    source = source_of(net)
    stages = {(s, r): _stage(source, s, r, tp, pp) for s in range(pp) for r in range(tp)}
    plan = Plan(tp=tp, pp=pp, microbatches=microbatches, dp=dp, schedule=schedule)
    order = {s: _order(s, pp, microbatches, schedule) for s in range(pp)}
    return CompiledProgram(source=source, plan=plan, stages=stages, schedule=order)


def _order(stage: int, pp: int, microbatches: int, schedule: str) -> tuple[Action, ...]:
    warm = microbatches if schedule == "gpipe" else min(pp - stage, microbatches)
    actions = [Action(stage, "F", i) for i in range(warm)]
    for i in range(microbatches):
        actions.append(Action(stage, "B", i))
        if warm + i < microbatches:
            actions.append(Action(stage, "F", warm + i))
    return tuple(actions)


def _stage(source: SpikeGraph, stage: int, rank: int, tp: int, pp: int) -> StageProgram:
    graph = fx.Graph()
    x = graph.placeholder("x")
    ports = (
        Port("u", Value((BATCH, 4), torch.float64, (1, 0), requires_grad=True)),
        Port("mask", Value((BATCH,), torch.bool, (1,))),
    )
    parts = ("a", "bn", "b") if stage == 0 else ("c", "d", "gain", "idle")
    if pp == 1:
        parts = ("a", "bn", "b", "c", "d", "gain", "idle")
        graph.output((_second(graph, *_first(graph, x, tp), tp),))
    elif stage == 0:
        graph.output(_first(graph, x, tp))
    else:
        graph.erase_node(x)
        u, mask = graph.placeholder("u"), graph.placeholder("mask")
        graph.output((_second(graph, u, mask, tp),))
    return StageProgram(
        stage=stage,
        tp_rank=rank,
        graph=graph,
        reads=("x",) if stage == 0 else (),
        receives=ports if stage == 1 else (),
        sends=ports if stage == 0 and pp == 2 else (),
        tensors=tuple(_slice(i, rank, tp) for n, i in source.tensors.items() if n.split(".")[0] in parts),
        leaves={},
    )


def _slice(info: TensorInfo, rank: int, tp: int) -> TensorSlice:
    part = TensorSlice(
        info.name,
        info.kind,
        tuple(info.tensor.shape),
        info.tensor.dtype,
        requires_grad=info.kind == "parameter",
        has_gradient=info.used,
    )
    dim = SLICED.get(info.name) if tp > 1 else None
    return part if dim is None else replace(part, dim=dim, pieces=halves(info.tensor.shape[dim], tp)[rank])


def _linear(graph: fx.Graph, x: fx.Node, name: str, tp: int, kind: str) -> fx.Node:
    weight, bias = graph.get_attr(f"{name}.weight"), graph.get_attr(f"{name}.bias")
    if kind == "column":
        x = graph.call_function(ops.grad_all_reduce, (x, "tp")) if tp > 1 else x
        return graph.call_function(F.linear, (x, weight, bias))
    part = graph.call_function(F.linear, (x, weight, None))
    whole = graph.call_function(ops.all_reduce, (part, "tp")) if tp > 1 else part
    return graph.call_function(torch.add, (whole, bias))


def _first(graph: fx.Graph, x: fx.Node, tp: int) -> tuple[fx.Node, fx.Node]:
    h = _linear(graph, x, "a", tp, "column")
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    h = graph.call_function(
        ops.batch_norm, (h, *(graph.get_attr(f"bn.{n}") for n in names), graph.get_attr("training"), 0.1, 1e-5)
    )
    u = _linear(graph, graph.call_function(ops.Surrogate(Spike), (h,)), "b", tp, "row")
    return u, graph.call_function(torch.gt, (graph.call_function(torch.sum, (x, 1)), 0))


def _second(graph: fx.Graph, u: fx.Node, mask: fx.Node, tp: int) -> fx.Node:
    z = graph.call_function(ops.Surrogate(Spike), (_linear(graph, u, "c", tp, "column"),))
    y = graph.call_function(torch.mul, (_linear(graph, z, "d", tp, "row"), graph.get_attr("gain")))
    half = graph.call_function(torch.mul, (y, 0.5))
    return graph.call_function(torch.where, (graph.call_function(torch.unsqueeze, (mask, 1)), y, half))
