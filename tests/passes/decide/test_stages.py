"""The cut into pipeline stages: optimal, honouring pins, the same on every rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from snnpart import facts
from snnpart.costs import CPU, Link
from snnpart.errors import PlanError
from snnpart.facts import Stage
from snnpart.passes.decide import decide
from snnpart.passes.decide.cut import best_cut
from snnpart.passes.decide.stages import apply_stages, lookup
from snnpart.passes.lower import lower
from snnpart.plan import Plan
from tests.lowering import analysed, assert_parity, compiled, fire, make


def _slowest(work: np.ndarray, crossing: np.ndarray, cuts: tuple[int, ...]) -> tuple[float, float]:
    bounds = [0, *cuts, len(work)]
    edge = [0.0, *crossing[1:], 0.0]
    times = [work[a:b].sum() + edge[a] + edge[b] for a, b in itertools.pairwise(bounds)]
    return max(times), sum(edge[cut] for cut in cuts)


@pytest.mark.parametrize("seed", range(8))
def test_the_cut_is_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, stages = int(random.integers(4, 9)), int(random.integers(2, 5))
    work, crossing = random.integers(1, 9, count).astype(float), random.integers(0, 4, count).astype(float)
    found = best_cut(work, crossing, np.zeros((stages, count + 1)))
    every = [_slowest(work, crossing, cuts) for cuts in itertools.combinations(range(1, count), stages - 1)]
    assert found is not None and len(found) == stages - 1
    assert _slowest(work, crossing, tuple(found)) == pytest.approx(min(every))


def test_pins_that_leave_no_room_give_no_cut() -> None:
    barred = np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    assert best_cut(np.ones(2), np.zeros(2), barred) is None


def test_stages_are_balanced_and_reproduced_from_the_plan() -> None:
    module, inputs, options = make("residual")
    graph = analysed(module, inputs, **options)
    near = replace(CPU, links={axis: Link(1e11, 1.0) for axis in CPU.links})
    plan = decide(graph, tp=1, pp=3, profile=near)
    program = lower(graph, plan, profile=near)
    times = [program.stage(stage, 0).predicted_us for stage in range(3)]
    assert max(times) < 0.7 * sum(times)
    copied = graph.copy()
    apply_stages(copied, Plan.from_json(plan.to_json()))
    decided = {n.name: s.index for n in program.source.graph.nodes if (s := facts.get(n, Stage))}
    assert decided == {n.name: s.index for n in copied.graph.nodes if (s := facts.get(n, Stage))}


def test_the_plan_fits_another_number_of_steps() -> None:
    module, inputs, options = make("widths")
    plan = decide(analysed(module, inputs, **options), tp=2, pp=2, profile=CPU)
    shorter = (inputs[0][:3],)
    program = lower(analysed(module, shorter, **options), plan, profile=CPU)
    assert_parity(module, shorter, program, in_dim=1)


def test_the_same_plan_every_time() -> None:
    """Case A11: a rank that decides for itself decides what the others do."""
    module, inputs, options = make("residual")
    plans = [decide(analysed(module, inputs, **options), tp=2, pp=2, profile=CPU) for _ in range(2)]
    assert plans[0].fingerprint == plans[1].fingerprint


def test_too_many_stages_says_the_most() -> None:
    module, inputs, options = make("loop")
    with pytest.raises(PlanError, match=r"pp=4, but the network can be cut into at most 3 stages"):
        decide(analysed(module, inputs, **options), tp=1, pp=4, profile=CPU)


def test_pins_are_honoured_and_count_below_their_path() -> None:
    module, inputs, options = make("residual")
    graph = analysed(module, inputs, **options)
    plan = decide(graph, tp=1, pp=2, pinned=Plan(pp=2, stages={"blocks.1": 1, "blocks.0": 0}), profile=CPU)
    assert plan.stages["blocks.0.conv2"] == 0 and plan.stages["blocks.1.conv1"] == 1 and plan.stages["stem"] == 0
    assert_parity(module, inputs, lower(graph, plan, profile=CPU))


def test_an_unbalanced_pin_is_honoured() -> None:
    module, inputs, options = make("residual")
    program = compiled(module, inputs, pp=2, pinned=Plan(pp=2, stages={"stem": 0, "blocks": 1}), **options)
    assert {t.name for t in program.stage(0, 0).tensors} == {"stem.weight", "stem.bias"}


def test_pins_against_the_order_are_refused() -> None:
    module, inputs, options = make("residual")
    with pytest.raises(PlanError, match=r"'blocks.1.conv1.*pinned to stage 0, but it needs .*stage 1") as refused:
        decide(
            analysed(module, inputs, **options),
            tp=1,
            pp=2,
            pinned=Plan(pp=2, stages={"blocks.0": 1, "blocks.1": 0}),
            profile=CPU,
        )
    assert "pin it to stage 1 or later" in str(refused.value)


def test_pins_that_tear_a_part_are_refused() -> None:
    module, inputs, options = make("tied")
    with pytest.raises(PlanError, match="cannot be cut apart"):
        decide(
            analysed(module, inputs, **options),
            tp=1,
            pp=2,
            pinned=Plan(pp=2, stages={"first": 0, "between": 1}),
            profile=CPU,
        )


def test_pins_outside_are_refused() -> None:
    module, inputs, options = make("residual")
    with pytest.raises(PlanError, match=r"pinned stages \{'head': 2\} are outside 0..1"):
        decide(analysed(module, inputs, **options), tp=1, pp=2, pinned=Plan(pp=3, stages={"head": 2}), profile=CPU)


def test_parallel_branches_can_be_pinned_in_any_order() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left = fire(self.b(fire(self.a(x))))
            return left + fire(self.d(fire(self.c(x))))

    module, inputs = Branches().double(), (torch.randn(4, 4, dtype=torch.float64),)
    program = compiled(module, inputs, pp=2, pinned=Plan(pp=2, stages={"c": 0, "d": 0, "a": 1, "b": 1}))
    assert program.plan.stages["a"] == 1 and program.plan.stages["d"] == 0
    assert_parity(module, inputs, program)


def test_a_plan_without_a_module_is_refused() -> None:
    module, inputs, options = make("residual")
    graph = analysed(module, inputs, **options)
    plan = decide(graph, tp=1, pp=2, profile=CPU)
    stages = {path: stage for path, stage in plan.stages.items() if not path.startswith("head")}
    with pytest.raises(PlanError, match=r"'head.weight': the plan gives it no stage"):
        lower(graph, replace(plan, stages=stages), profile=CPU)
    with pytest.raises(PlanError, match=r"stages \[1\] of pp=2 hold no layer"):
        lower(graph, replace(plan, stages=dict.fromkeys(plan.stages, 0)), profile=CPU)


def test_lookup_takes_the_longest_path() -> None:
    pinned = {"a": 0, "a.b": 1}
    assert [lookup(pinned, name) for name in ("a.b.weight", "a.c", "ab", "")] == [1, 0, None, None]


def test_tensors_that_one_mode_does_not_use_stay_where_the_other_mode_has_them() -> None:
    class Counting(nn.Module):
        """Counts its training batches in a buffer of its own, after its last layer."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)
            self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = fire(self.b(fire(self.a(x))))
            if self.training:
                self.seen += out.detach().sum(0)
            return out

    module, inputs = Counting().double(), (torch.randn(4, 4, dtype=torch.float64),)
    trained = compiled(module, inputs, pp=2)
    evaluated = compiled(module, inputs, pp=2, pinned=trained.plan, training=False)
    assert evaluated.plan.stages == trained.plan.stages and trained.plan.stages["seen"] == 1
    assert [t.name for t in evaluated.stage(1, 0).tensors] == [t.name for t in trained.stage(1, 0).tensors]


def test_a_buffer_written_in_a_later_stage_does_not_take_its_neuron_along() -> None:
    class Counting(nn.Module):
        """Spikes, counted in a buffer: its write is the last thing that happens."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(6, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spikes = fire(x)
            self.count = spikes.detach().sum(0)
            return spikes

    module = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), Counting()))).double()
    inputs = (torch.randn(4, 6, dtype=torch.float64),)
    program = compiled(module, inputs, pp=2)
    stages = program.plan.stages
    assert {stages[f"{i}.count"] for i in (1, 3)} == {1} and stages["2"] == 0 == stages.get("1", 0)
    assert_parity(module, inputs, program)
