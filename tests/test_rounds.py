"""Networks that take k of their T steps at a time compute what the loop computes, in every topology."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import artifact, costs, ops, parallelize, text
from snnpart.api import ParallelProgram
from snnpart.errors import ConfigError
from snnpart.ops_fused import NORMS
from snnpart.ops_time import Loop, all_nodes
from snnpart.runtime.launch import launch
from tests.passes.rewrite.fold_time import nets
from tests.passes.rewrite.fold_time.parity import active, images

STEPS = 6


class Late(nn.Module):
    """A hand-written neuron of whose output nothing is carried."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.decay = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        v, out = torch.zeros(x.shape[0], 4, dtype=x.dtype), []
        for _ in range(STEPS):
            v = self.decay.clamp(0, 1) * v * (v < 1).to(v.dtype) + self.fc(x)
            out.append(torch.sigmoid(4 * (v - 1)))
        return torch.stack(out)


class Last(Late):
    """Of which only the last step is read, and the membrane that it leaves."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        v, spikes = torch.zeros(x.shape[0], 4, dtype=x.dtype), x
        for _ in range(STEPS):
            v = self.decay * v * (v < 1).to(v.dtype) + self.fc(x)
            spikes = torch.sigmoid(4 * (v - 1))
        return 2.0 * spikes, v


MAKE: dict[str, Any] = {
    "norse": (lambda: nets.NorseLoop(STEPS), (4, 1, 6, 6), torch.float64, "norse"),
    "residual": (lambda: nets.Residual(STEPS), (4, 2, 5, 5), torch.float64, "torch"),
    "snntorch": (lambda: nets.ConvLoop(STEPS), (4, 1, 10, 10), torch.float32, "snntorch"),
    "last": (Last, (4, 4), torch.float64, "torch"),
    "late": (Late, (4, 4), torch.float64, "torch"),
}


def compiled(name: str, fold: bool | int, **options: Any) -> tuple[ParallelProgram, Tensor]:
    """The program, compared with the module as it compiles, and an input."""
    build, shape, dtype, needs = MAKE[name]
    pytest.importorskip(needs)
    torch.manual_seed(3)
    module = active(build(), dtype, 4.0).train()
    x = images(*shape, dtype=dtype)
    return parallelize(module, example_inputs=x, fold=fold, verify="full", **options), x


def rounds(program: ParallelProgram) -> list[tuple[int, bool]]:
    """Steps at a time of every loop in rounds, and whether its first round is shorter."""
    graphs = [stage.graph for stage in program.compiled.stages.values()]
    loops = [node.target for graph in graphs for node in graph.nodes if isinstance(node.target, Loop)]
    return [(loop.together, loop.first is not None) for loop in loops if loop.together]


@pytest.mark.parametrize("together", [True, 1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("name", MAKE)
def test_rounds_compute_what_the_loop_computes(name: str, together: int) -> None:
    """A first round takes the steps that are over; of fewer steps than k there is one round."""
    program, _ = compiled(name, together)
    some = together is not True and together < STEPS
    assert program.plan.fold == (together if some else 0)
    assert rounds(program) == ([(together, STEPS % together > 0)] if some else [])


@pytest.mark.parametrize("together", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"pp": 2, "schedule": "1f1b", "microbatches": 2},
        {"pp": 2, "schedule": "zbv", "microbatches": 4},
    ],
    ids=["1f1b", "zbv"],
)
def test_rounds_of_stages(options: dict[str, Any], together: int) -> None:
    program, _ = compiled("residual", together, **options)
    found = rounds(program)
    assert len(found) >= 2 and set(found) == {(together, STEPS % together > 0)}


@pytest.mark.parametrize("together", [2, 4])
def test_rounds_come_back_from_an_artifact(tmp_path: Path, together: int) -> None:
    program, x = compiled("residual", together)
    artifact.save(program.compiled, tmp_path / "p")
    loaded = artifact.load(tmp_path / "p")
    assert text.print_graph(loaded.source) == text.print_graph(program.compiled.source)
    found = []
    for one in (program.compiled, loaded):
        with launch(one) as running:
            loss = running.train_step(x, torch.zeros(4), lambda out, _: out.square().mean())
            found.append((loss, running.gradients()))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(grad, found[1][1][name]) and grad.any() for name, grad in found[0][1].items())


def test_the_number_is_the_largest_whose_values_stay_in_the_cache() -> None:
    """Of those that divide the steps into so many rounds the smallest; without a cache all steps."""
    profile = costs.default_profile("cpu-2core")
    found = []
    for cache in (1.0, 3e4, 1e9, 0.0):
        program, _ = compiled("residual", True, profile=replace(profile, cache=cache, launch_us=0.001))
        found.append(program.plan.fold)
    assert found[0] == 1 and 1 <= found[1] < STEPS and found[2:] == [0, 0]


@pytest.mark.parametrize("together", [2, 4])
@pytest.mark.parametrize("name", MAKE)
def test_rounds_of_tp_ranks(name: str, together: int) -> None:
    """The ranks meet in the collectives of each round; of a layer that sees a still image they do before them."""
    program, _ = compiled(name, together, tp=2)
    assert rounds(program) == [(together, STEPS % together > 0)] * 2
    stages = program.compiled.stages.values()
    assert all(any(part.pieces for part in stage.tensors) for stage in stages)
    assert {bool(sent_inside(stage.graph)) for stage in stages} == {name not in ("last", "late")}


def sent_inside(graph: fx.Graph) -> int:
    """How many collectives stand in loops in rounds."""
    loops = [node.target for node in graph.nodes if isinstance(node.target, Loop) and node.target.together]
    return sum(node.target in ops.COLLECTIVES for loop in loops for node in loop.body.nodes)


@pytest.mark.parametrize("name", ["residual", "snntorch"])
def test_rounds_of_more_ranks_than_channels(name: str) -> None:
    """Ranks without channels take the same rounds."""
    program, _ = compiled(name, 4, tp=5)
    vacant = [graph for graph in map(body_of, range(5), [program] * 5) if "vacant" in str(graph)]
    assert rounds(program) == [(4, True)] * 5 and 0 < len(vacant) < 5


def test_evaluations_of_more_ranks_than_channels() -> None:
    """Norms are folded on the ranks that have channels of theirs; the others meet them all the same."""
    program, _ = compiled("residual", 4, tp=5, numerics="fold")
    stages = program.compiled.stages
    graphs = [stage.evaluation for stage in stages.values()]
    norms = [-1 if graph is None else sum(node.target in NORMS for node in all_nodes(graph)) for graph in graphs]
    assert norms == [0, 0, 0, 0, 2]
    sent = {str([node.target for node in all_nodes(graph) if node.target in ops.COLLECTIVES]) for graph in graphs}
    assert len(sent) == 1 and sent != {"[]"}
    assert not any("not folded" in notice for notice in program.compiled.notices)


def body_of(rank: int, program: ParallelProgram) -> fx.Graph:
    """A round of a tp rank."""
    (loop,) = (n.target for n in program.compiled.stage(0, rank).graph.nodes if isinstance(n.target, Loop))
    return loop.body


@pytest.mark.parametrize("feedback", [False, True], ids=["forward", "feedback"])
@pytest.mark.parametrize("norm", ["layer", "group", "by hand"])
def test_rounds_of_norms_over_tp_ranks(norm: Any, feedback: bool) -> None:
    """A norm over shared channels sends its statistics of each round."""
    torch.manual_seed(3)
    layers = nets.Layer(norm=norm, feedback=feedback), nets.Layer(norm=norm)
    module = active(nets.RandomLoop(nets.Shape(layers=layers, source="time-first", steps=STEPS)))
    program = parallelize(module, example_inputs=module.input(4), input_layout="TNF", tp=2, fold=4, verify="full")
    assert rounds(program) == [(4, True)] * 2
    assert ("statistics" in program.plan.shards.values()) is (norm == "layer")
    assert sent_inside(program.compiled.stage(0, 0).graph)


def test_rounds_of_a_grid() -> None:
    program, _ = compiled("residual", 4, tp=2, pp=2, schedule="1f1b", microbatches=2)
    assert rounds(program) == [(4, True)] * 4


def test_more_rounds_are_more_messages() -> None:
    """What the ranks send in all does not depend on the rounds."""
    sent = [
        sum(row.forward_bytes for row in compiled("residual", k, tp=2)[0].report().collectives) for k in (True, 2, 4)
    ]
    assert len(set(sent)) == 1 and sent[0] > 0


def test_slow_links_make_fewer_rounds() -> None:
    profile, found = replace(costs.default_profile("cpu-2core"), cache=1.0, launch_us=0.001), []
    for latency in (1e-3, 1e6):
        links = {**profile.links, "tp": replace(profile.links["tp"], latency_us=latency)}
        found.append(compiled("residual", True, tp=2, profile=replace(profile, links=links))[0].plan.fold)
    assert found == [1, 0]


def test_why_a_network_takes_no_rounds() -> None:
    pytest.importorskip("spikingjelly")
    from spikingjelly.activation_based import neuron

    module = nn.Sequential(nn.Linear(4, 4), neuron.LIFNode(), nn.Linear(4, 4), neuron.LIFNode())
    for tp in (1, 2):
        with pytest.raises(ConfigError, match=r"fold=2: .*takes all steps at once|fold=2: there is no loop over time"):
            parallelize(module, example_inputs=torch.rand(4, 4), time_steps=4, fold=2, tp=tp)
