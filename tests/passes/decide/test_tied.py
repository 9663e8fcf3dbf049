"""Parameters that several stages may hold: which they are, when copies pay, and the plan that says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts, text
from snnpart.api import parallelize
from snnpart.costs import CPU, Link, MachineProfile
from snnpart.errors import ConfigError, PlanError
from snnpart.facts import Copy
from snnpart.graph import SpikeGraph
from snnpart.passes.decide import decide
from snnpart.passes.decide.tied import find_copies
from snnpart.passes.lower import lower
from snnpart.plan import Plan
from tests.distributed.case import fill
from tests.distributed.cases_tied import TIED, LanguageModel, Shared, Transposed
from tests.lowering import analysed, assert_parity, compiled, fire, make, rates

TOKENS = torch.arange(20).reshape(4, 5) % 7
IMAGES = TIED["shared conv"].batches()[0][0]
NEAR = replace(CPU, links={axis: Link(1e11, 1.0) for axis in CPU.links})
FAR = replace(CPU, links={axis: Link(1e2, 1.0) for axis in CPU.links})


def keys(module: nn.Module, *inputs: Tensor) -> dict[str, tuple[str, ...]]:
    return {name: copies.keys for name, copies in find_copies(analysed(module, inputs)).items()}


def test_copies_go_by_the_readers_own_name_or_by_number() -> None:
    assert keys(fill(LanguageModel()), TOKENS) == {"emb.weight": ("emb.weight", "head.weight")}
    assert keys(fill(Transposed()), TOKENS) == {"emb.weight": ("emb.weight", "emb.weight@1")}


def test_a_layer_that_is_used_twice_in_a_step_has_two_places_whatever_the_loop() -> None:
    found = keys(fill(Shared()), IMAGES)
    assert found == {name: (name, f"{name}@1") for name in ("conv.weight", "conv.bias", "scale")}


@pytest.mark.parametrize("name", ["loop", "residual", "unet"])
def test_a_layer_that_a_loop_calls_at_every_step_has_one_place(name: str) -> None:
    module, inputs, options = make(name)
    assert find_copies(analysed(module, inputs, **options)) == {}


class Standardised(nn.Module):
    """A weight standardised by a gain, read first and last; the gain is a parameter, or a buffer."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.w, self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4), nn.Linear(4, 4)
        gain = torch.linspace(0.5, 2.0, 4)[:, None]
        if buffer:
            self.register_buffer("gain", gain)
        else:
            self.gain = nn.Parameter(gain)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.w - self.w.mean(1, keepdim=True)) * self.gain
        x = fire(nn.functional.linear(x, weight))
        return nn.functional.linear(fire(self.b(fire(self.a(x)))), weight)


@pytest.mark.parametrize("buffer", [False, True])
def test_what_is_computed_from_copies_is_copied_too(buffer: bool) -> None:
    module, x = Standardised(buffer=buffer).double(), 2 * torch.randn(6, 4, dtype=torch.float64)
    assert keys(module, x) == {"w": ("w", "w@1"), "gain": ("gain", "gain@1")}
    assert all(0.01 < rate < 0.99 for rate in rates(module, (x,)))
    program = compiled(module, (x,), pp=2)
    assert program.plan.tied == ("gain", "w")
    assert_parity(module, (x,), program)


class Counting(nn.Module):
    """A buffer that the network changes, read by its first and its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(4))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = fire(self.a(x * self.seen))
        x = self.c(fire(self.b(x)) * self.seen)
        self.seen = self.seen + 1
        return x


def test_a_buffer_that_is_written_stays_in_one_stage() -> None:
    assert keys(Counting().double(), torch.randn(6, 4, dtype=torch.float64)) == {}


class Masked(nn.Module):
    """Every layer reads one mask, a buffer or a constant."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        mask = torch.ones(4, 4, dtype=torch.float64).tril()
        if registered:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask
        self.mask: Tensor
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + fire(self.mask @ layer(x))
        return x


@pytest.mark.parametrize("registered", [True, False])
def test_what_nothing_writes_binds_no_layers(registered: bool) -> None:
    module, x = Masked(registered).double(), torch.randn(6, 4, 5, dtype=torch.float64)
    program = compiled(module, (x,), pp=4, microbatches=2)
    assert program.plan.tied == ("mask",)
    held = [part.stages for s in range(4) for part in program.stage(s, 0).tensors if part.name == "mask"]
    assert len(held) > 1 and {len(stages) for stages in held} == {len(held)}
    assert_parity(module, (x,), program, microbatches=2)


@pytest.mark.parametrize("name", ["tied ends", "shared conv"])
@pytest.mark.parametrize("tp, pp", [(1, 2), (1, 3), (2, 2), (3, 4)])
def test_all_ranks_together_compute_what_the_network_computes(name: str, tp: int, pp: int) -> None:
    module, (x, _) = TIED[name].model(), TIED[name].batches()[0]
    program = compiled(module, (x,), tp=tp, pp=pp, microbatches=2)
    assert program.plan.tied
    assert_parity(module, (x,), program, microbatches=2)


def graph_of(name: str) -> SpikeGraph:
    return analysed(TIED[name].model(), (TIED[name].batches()[0][0],))


def chosen(name: str, profile: MachineProfile, pp: int = 2, schedule: str = "gpipe") -> tuple[Plan, str]:
    graph = graph_of(name)
    plan = decide(graph, tp=1, pp=pp, schedule=schedule, microbatches=2, profile=profile)
    return plan, graph.notes.get("decide-stages", "")


def test_copies_are_made_where_no_cut_is_possible_without() -> None:
    plan, why = chosen("shared conv", NEAR)
    assert plan.tied == ("conv.bias", "conv.weight", "scale")
    assert "conv.weight (0.000648 MB) is held by the stages 0 and 1" in why
    assert "us, 2 of them to sum the gradients of copies; in one stage no cut was possible" in why


def test_copies_on_one_rank_cost_nothing() -> None:
    """Under zbv the first and the last stage are of one rank."""
    plan, why = chosen("tied ends", FAR, schedule="zbv")
    assert plan.tied == ("emb.weight",) and plan.stages["emb"] == 0 and plan.stages["head"] == 3
    assert "us, 0 of them to sum the gradients" in why


class Two(nn.Module):
    """A small matrix at both ends of the first two thirds, a large one at both ends of the last: [N, 8] -> [N, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(8, 2)
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.last = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = fire(self.small(x))
        for layer in self.first:
            x = fire(layer(x))
        x = fire(self.large(fire(x @ self.small.weight)))
        for layer in self.last:
            x = fire(layer(x))
        return self.head(x @ self.large.weight)


def of_two(all_reduce_us: float) -> tuple[Plan, str]:
    """What is decided where an all-reduce of any size takes so long."""
    graph = analysed(Two().double(), (torch.randn(6, 8, dtype=torch.float64),))
    measured = {"all_reduce/2": [(1.0, all_reduce_us), (1e9, all_reduce_us)]}
    profile = replace(CPU, links={axis: Link(1e9, 1.0, measured) for axis in CPU.links})
    plan = decide(graph, tp=1, pp=3, schedule="gpipe", microbatches=2, profile=profile)
    return plan, graph.notes.get("decide-stages", "")


def test_only_the_copies_that_pay_are_made() -> None:
    plan, why = of_two(5.0)
    assert plan.tied == ("small.weight",)
    assert "small.weight (0.000512 MB) is held by the stages 0 and 1" in why
    assert "to sum the gradients of copies; in one stage it would take" in why


def test_there_are_none_where_the_exchange_costs_more() -> None:
    plan, why = of_two(1e4)
    assert plan.tied == ()
    assert "small.weight" in why and "in one stage: a step takes" in why and "with copies" in why


def test_the_plan_is_kept_and_fits_another_number_of_steps() -> None:
    model = TIED["tied ends"].model()
    program = parallelize(model, pp=3, example_inputs=TOKENS, verify="off")
    plan = Plan.from_json(program.plan.to_json())
    assert plan == program.plan and plan.tied == ("emb.weight",)
    again = parallelize(model, plan=plan, example_inputs=TOKENS[:, :3])
    assert again.plan == plan
    held = [{part.name: part.stages for part in again.compiled.stage(s, 0).tensors} for s in range(3)]
    assert held[0]["emb.weight"] == held[2]["emb.weight"] == (0, 2) and "emb.weight" not in held[1]


def test_stages_and_copies_by_hand() -> None:
    model = TIED["tied ends"].model()
    with pytest.raises(PlanError, match="cannot be cut apart"):
        parallelize(model, plan=Plan(pp=2, stages={"emb": 0, "up.0": 0, "head": 1}), example_inputs=TOKENS)
    plan = Plan(pp=2, tied=("emb.weight",), stages={"emb": 0, "up.0": 0, "up.1": 1, "emb.weight@1": 1})
    program = parallelize(fill(Transposed()), plan=plan, example_inputs=TOKENS)
    assert program.plan.stages["emb.weight"] == 0 and program.plan.stages["emb.weight@1"] == 1
    with pytest.raises(ConfigError, match="tied='emb.weight' is no list of names"):
        Plan(pp=2, tied="emb.weight")  # type: ignore[arg-type]


def test_a_bound_counts_every_copy() -> None:
    graph = graph_of("tied ends")
    plan = decide(graph, tp=1, pp=2, microbatches=2, profile=NEAR)
    program = lower(graph, plan, profile=NEAR)
    held = [{part.name for part in program.stage(stage, 0).tensors} for stage in range(2)]
    assert all("emb.weight" in names for names in held)
    least = max(program.footprint(rank, 0).total for rank in range(2))
    assert decide(graph, tp=1, pp=2, microbatches=2, memory=least, profile=NEAR).tied == ("emb.weight",)
    with pytest.raises(PlanError, match="a rank holds at least"):
        decide(graph, tp=1, pp=2, microbatches=2, memory=least // 3, profile=NEAR)


def test_reads_of_copies_print_and_parse() -> None:
    graph = lower(source := graph_of("tied ends"), decide(source, tp=1, pp=2, profile=CPU), profile=CPU).source
    printed = text.print_graph(graph)
    assert 'Copy(key="head.weight")' in printed
    values = {name: info.tensor for name, info in graph.tensors.items()}
    leaves = {path: info.module for path, info in graph.leaves.items()}
    parsed = text.parse_graph(printed, tensors=values, leaves=leaves)
    assert {facts.need(n, Copy).key for n in parsed.graph.nodes if facts.get(n, Copy)} == {"head.weight"}
