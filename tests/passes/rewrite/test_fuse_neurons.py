"""fuse-neurons: what is fused, what stays and why, and that a fused program computes what the module computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import snntorch
import snntorch.surrogate
import torch
from spikingjelly.activation_based import neuron, surrogate
from torch import Tensor, fx, nn

from snnpart import facts, ops, text
from snnpart.compilation import Options, compile_program
from snnpart.costs import CPU
from snnpart.errors import ConfigError
from snnpart.facts import Cost, Value
from snnpart.neuron_step import NeuronStep, StepError, scan_of_leaf, trace_step
from snnpart.ops_fused import FusedNeuron, parts
from snnpart.ops_time import Loop
from snnpart.passes.analyze.cost import own_saved
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from snnpart.step_code import check_code
from tests.runtime.kernels.fused import Block, Steps, Written


def compiled(model: nn.Module, *shape: int, plan: Plan | None = None, **options: Any) -> CompiledProgram:
    given: dict[str, Any] = {"input_layout": "TNCHW", "verify": "off", "fuse": True, **options}
    x = torch.rand(shape or (4, 2, 5, 6, 6), generator=torch.Generator().manual_seed(0))
    return compile_program(model, x, Options(**given), plan)[0]


def fused_in(program: CompiledProgram) -> list[fx.Node]:
    return [n for stage in program.stages.values() for n in stage.graph.nodes if isinstance(n.target, FusedNeuron)]


def lif(**given: Any) -> nn.Module:
    return neuron.LIFNode(step_mode="m", surrogate_function=surrogate.ATan(), **given)


@pytest.mark.parametrize("options", [{"fuse": False}, {"fuse": None, "state": "carry"}])
def test_rounded_states_are_refused_where_none_is_fused(options: dict[str, Any]) -> None:
    message = "neuron_dtype='bf16' rounds the states of fused neurons, and none is fused"
    with pytest.raises(ConfigError, match=message) as refused:
        compiled(Block(lif()), neuron_dtype="bf16", **options)
    assert refused.value.fix.startswith("leave neuron_dtype out, or have neurons fused: fuse=True")


@pytest.mark.parametrize("given", ["nchw", "yes", 1])
def test_channels_last_is_true_or_false(given: object) -> None:
    with pytest.raises(ConfigError, match=f"channels_last={given!r} is not known"):
        Options(channels_last=given)  # type: ignore[arg-type]


def test_a_given_plan_s_kernels_are_kept_where_nothing_else_is_asked_for() -> None:
    """Not where states outlive a call: the layers hold them."""
    plan = compiled(Block(lif()), channels_last=True).plan
    kept = compiled(Block(lif()), plan=plan, fuse=None).plan
    assert (kept.fuse, kept.channels_last) == (True, True)
    assert compiled(Block(lif()), plan=plan, fuse=None, neuron_dtype="bf16").plan.neuron_dtype == "bfloat16"
    assert not compiled(Block(lif()), plan=plan, fuse=None, state="carry").plan.fuse
    assert not compiled(Block(lif()), plan=plan, fuse=None, detach_every=2).plan.fuse


def test_what_is_asked_for_beside_a_plan_leaves_the_rest_to_it() -> None:
    plan = compiled(Block(lif()), channels_last=True, neuron_dtype="bf16").plan

    def found(**given: Any) -> tuple[Any, ...]:
        kept = compiled(Block(lif()), plan=plan, **given).plan
        return kept.fuse, kept.channels_last, kept.neuron_dtype

    assert found(fuse=True) == (True, True, "bfloat16")
    assert found(fuse=False) == (False, True, "float32")
    assert found(fuse=None, channels_last=False) == (True, False, "bfloat16")
    assert found(fuse=None, neuron_dtype="fp16") == (True, True, "float16")


def test_rounded_states_have_neurons_fused_and_what_is_not_is_named() -> None:
    (node,) = fused_in(compiled(Block(lif()), fuse=None, neuron_dtype="fp16"))
    assert node.target.state == "float16"  # type: ignore[union-attr]
    found = compiled(Steps(Mixing()), fuse=None, neuron_dtype="bf16").notices
    assert found[0].endswith("; its states are not rounded to bfloat16")


def test_norm_neuron_and_addition_become_one_node() -> None:
    program = compiled(Block(lif()))
    (node,) = fused_in(program)
    target: Any = node.target
    found = parts(target.region)
    assert found.norm is not None and found.residual is not None and found.stacked
    assert [n.target for n in program.stages[0, 0].graph.nodes if n.target in (ops.batch_norm, torch.add)] == []
    assert (target.steps, target.state) == (4, "float32")


def test_a_plan_that_does_not_say_so_leaves_neurons_alone() -> None:
    assert fused_in(compiled(Block(lif()), fuse=None)) == []
    assert fused_in(compiled(Block(lif()), state="carry")) == []


@pytest.mark.parametrize(("steps", "taken"), [(4, True), (17, False)])
def test_a_norm_inside_a_loop_is_taken_along_up_to_16_steps(steps: int, taken: bool) -> None:
    (node,) = fused_in(compiled(Steps(Written(), norm=True), steps, 2, 5, 6, 6))
    assert (parts(node.target.region).norm is not None) is taken  # type: ignore[union-attr]


@pytest.mark.parametrize("norm", [False, True])
def test_a_loop_that_is_shown_one_image_is_fused_and_reads_it_once(norm: bool) -> None:
    (node,) = fused_in(compiled(Steps(Written(), norm=norm, still=True)))
    found = parts(node.target.region)  # type: ignore[union-attr]
    assert found.shared and (found.norm is not None) is norm


class Still(nn.Module):
    """Its neuron is shown the first image at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.neuron = nn.Conv2d(5, 5, 3), lif()

    def forward(self, x: Tensor) -> Tensor:
        spikes: Tensor = self.neuron(self.conv(x[0]).unsqueeze(0).expand(4, -1, -1, -1, -1))
        return spikes


@pytest.mark.parametrize(
    "model",
    [lambda: Block(lif(), norm=False, residual=False), lambda: Steps(Written()), lambda: Still()],
    ids=["layer", "loop", "one image"],
)
def test_a_neuron_costs_what_it_was_planned_to(model: Callable[[], nn.Module]) -> None:
    """One kernel each way, before the pass and after it."""
    program = compiled(model())
    (scan,) = (n for n in program.source.graph.nodes if n.op == "call_module" or isinstance(n.target, Loop))
    (node,) = fused_in(program)
    planned, found = facts.need(scan, Cost), facts.need(node, Cost)
    assert replace(planned, saved=found.saved) == found
    assert found.launch_us == CPU.launch_us and found.flops > 0 and found.backward_us > found.forward_us


def test_a_norm_and_an_addition_cost_a_fused_neuron_what_they_read() -> None:
    """Statistics and the sums of backward: two kernels more each, which read what the others do."""
    (bare,), (whole,) = (fused_in(compiled(Block(lif(), norm=has, residual=has))) for has in (False, True))
    one, more = facts.need(bare, Cost), facts.need(whole, Cost)
    us = lambda tensors: 1e6 * tensors * one.written / CPU.copy  # noqa: E731
    assert (one.forward_us, one.backward_us) == pytest.approx((CPU.launch_us + us(2), CPU.launch_us + us(3)))
    assert (more.forward_us, more.backward_us) == pytest.approx((3 * CPU.launch_us + us(4), 3 * CPU.launch_us + us(5)))


@pytest.mark.parametrize(
    ("steps", "chunks", "state", "size"),
    [(4, 1, "fp32", 4), (8, 1, "fp32", 4), (9, 1, "bf16", 2), (16, 2, "fp32", 4), (20, 4, "bf16", 2)],
)
def test_memory_counts_the_states_that_are_kept(steps: int, chunks: int, state: str, size: int) -> None:
    """x, and two states at the start of every chunk but the first."""
    model = Steps(snntorch.Synaptic(alpha=0.8, beta=0.9, init_hidden=False), states=2)
    (node,) = fused_in(compiled(model, steps, 2, 5, 6, 6, neuron_dtype=state))
    value = facts.need(node, Value)
    assert own_saved(node, value) == (chunks - 1) * 2 * value.numel / steps * size


def test_shared_statistics_are_fused_too() -> None:
    (node,) = fused_in(compiled(Block(lif()), batchnorm="sync"))
    assert parts(node.target.region).norm is not None  # type: ignore[union-attr]


class TwoReaders(Block):
    """The norm's result is read twice."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        return self.neuron(y) + y  # type: ignore[no-any-return]


class Recorded(Block):
    """The spikes are read twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        spikes = self.neuron(x)
        return spikes + x, spikes


def test_what_others_read_too_stays_outside() -> None:
    (node,) = fused_in(compiled(TwoReaders(lif())))
    found = parts(node.target.region)  # type: ignore[union-attr]
    assert found.norm is None and found.residual is not None
    (node,) = fused_in(compiled(Recorded(lif())))
    assert parts(node.target.region).residual is None  # type: ignore[union-attr]


class Twice(nn.Module):
    """One layer called twice, which hands its state on."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = lif()

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.neuron(x)
        second: Tensor = self.neuron(x * 0.5)
        return first + second


class Mixing(Written):
    """Membranes of one image inhibit each other."""

    def forward(self, x: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().forward(x, None if v is None else v - v.mean((1, 2, 3), keepdim=True))


class AllResults(Steps):
    """Spikes and membranes are kept."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        v, kept = None, []
        for t in range(x.shape[0]):
            spikes, v = self.step(self.conv(x[t]), v)
            kept.append((spikes, v))
        return torch.stack([s for s, _ in kept]), torch.stack([v for _, v in kept])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Twice, "it is called 2 times, with state handed on"),
        (
            lambda: Block(neuron.LIFNode(step_mode="m", surrogate_function=surrogate.PoissonPass())),
            "it draws random numbers",
        ),
        (lambda: AllResults(Written()), "several results of its loop are used"),
    ],
)
def test_what_stays_is_named_with_the_reason(make: Callable[[], nn.Module], reason: str) -> None:
    program = compiled(make())
    assert fused_in(program) == []
    assert any(f"is not fused: {reason}" in notice for notice in program.notices)
    plain = compiled(make(), fuse=False)
    assert text.print_fx(program.stages[0, 0].graph) == text.print_fx(plain.stages[0, 0].graph)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Block(neuron.PSN(T=4)), "it has no single-step form"),
        pytest.param(  # SpikingJelly's own: in multi-step mode it fires as LIFNode does
            lambda: Block(neuron.LIAFNode(torch.tanh, True, step_mode="m")),
            "the recorded step has another output than the layer has for all steps at once",
            marks=pytest.mark.skipif(not hasattr(neuron, "LIAFNode"), reason="this SpikingJelly has none"),
        ),
        (
            lambda: Steps(snntorch.Leaky(beta=torch.rand(6))),
            "'beta' has shape (6,), which is no number for each channel",
        ),
        (lambda: Steps(Mixing(), norm=True), "there is no kernel text for aten.mean"),
        (lambda: Steps(Mixing(), still=True), "there is no kernel text for aten.mean"),
    ],
)
def test_a_step_without_kernel_text_is_compiled(make: Callable[[], nn.Module], reason: str) -> None:
    program = compiled(make())
    (node,) = fused_in(program)
    assert node.target.way == "compiled" and parts(node.target.region).norm is None  # type: ignore[union-attr]
    assert any(f"is compiled, not generated: {reason}" in notice for notice in program.notices)
    written = text.print_fx(program.stages[0, 0].graph)
    assert " = fused 4 float32 compiled(" in written
    assert text.print_fx(text.parse_fx(written)) == written


@pytest.mark.parametrize(
    ("options", "way"),
    [({"fuse": "auto"}, "measured"), ({"fuse": "auto", "batchnorm": "sync"}, "kernel"), ({"fuse": True}, "kernel")],
)
def test_ways_are_measured_when_asked_for_and_where_other_ranks_need_not_agree(
    options: dict[str, Any], way: str
) -> None:
    (node,) = fused_in(compiled(Block(lif()), **options))
    assert node.target.way == way  # type: ignore[union-attr]
    sharded = fused_in(compiled(Block(lif(), channels=6), 4, 2, 6, 6, 6, tp=2, **options))
    assert {node.target.way for node in sharded} == {"kernel"}  # type: ignore[union-attr]


def test_a_fused_program_is_text_that_parses_back() -> None:
    graph = compiled(Block(lif()), neuron_dtype="bfloat16").stages[0, 0].graph
    written = text.print_fx(graph)
    assert " = fused 4 bfloat16(" in written
    assert text.print_fx(text.parse_fx(written)) == written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("bfloat16", "float8"), "states are not kept in 'float8'"),
        (("  region\n", "  body\n"), "a fused neuron is followed by its region"),
    ],
)
def test_text_that_is_no_fused_neuron(change: tuple[str, str], message: str) -> None:
    written = text.print_fx(compiled(Block(lif()), neuron_dtype="bfloat16").stages[0, 0].graph)
    with pytest.raises(ConfigError, match=message):
        text.parse_fx(written.replace(*change))


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "microbatches": 2}])
def test_a_fused_program_computes_what_the_module_computes(options: dict[str, Any]) -> None:
    """The gate compares outputs, gradients and buffers of all ranks with the module's."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(lif(), channels=6), Block(lif(v_reset=None), channels=6)).double()
    x = (torch.rand((4, 4, 6, 5, 5), generator=torch.Generator().manual_seed(0)) * 2).double()
    program, report = compile_program(model, x, Options(input_layout="TNCHW", fuse=True, **options))
    assert len(fused_in(program)) >= 2
    assert report is not None


SURROGATES = {
    name: kind
    for name, kind in vars(surrogate).items()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and not name.endswith("Base")
}
RANDOM = {"PoissonPass"}
NEEDS_ARGUMENTS = {"MultiLevelSpikeCount": {"max_spike_count": 4}}


def _step(name: str, **given: Any) -> NeuronStep:
    made = neuron.LIFNode(step_mode="m")
    made.surrogate_function = SURROGATES[name](**NEEDS_ARGUMENTS.get(name, {}), **given)
    step = trace_step(scan_of_leaf("neuron", made), 3)
    check_code(step)
    return step


@pytest.mark.parametrize("name", sorted(set(SURROGATES) - RANDOM))
def test_every_surrogate_of_spikingjelly_is_generated(name: str) -> None:
    step = _step(name)
    assert step.states == 1
    assert any(node.op == "call_function" for node in step.next.backward.nodes)


@pytest.mark.parametrize("name", sorted(set(SURROGATES) - RANDOM - {"FakeNumericalGradient", "SuperSpike"}))
def test_so_is_every_one_without_spikes(name: str) -> None:
    """Of two SpikingJelly has no such form."""
    assert _step(name, spiking=False).states == 1


@pytest.mark.parametrize("name", sorted(RANDOM & set(SURROGATES)))
def test_a_surrogate_that_draws_is_not(name: str) -> None:
    with pytest.raises(StepError, match="cannot be recorded"):
        _step(name)


def test_recording_a_step_leaves_the_layer_as_it_was() -> None:
    layer = lif()
    layer(torch.rand(3, 2, 4))
    before = copy.deepcopy(layer.__dict__["_memories"])
    trace_step(scan_of_leaf("neuron", layer), 2)
    assert torch.equal(layer.__dict__["_memories"]["v"], before["v"])


@pytest.mark.parametrize(
    "name",
    [
        "straight_through_estimator",
        "triangular",
        "fast_sigmoid",
        "atan",
        "heaviside",
        "sigmoid",
        "spike_rate_escape",
        "SFS",
    ],
)
def test_surrogates_of_snntorch_are_generated(name: str) -> None:
    layer = snntorch.Leaky(beta=0.9, spike_grad=getattr(snntorch.surrogate, name)())
    assert len(fused_in(compiled(Steps(layer)))) == 1


@pytest.mark.parametrize("still", [False, True])
def test_a_surrogate_of_snntorch_that_draws_stays(still: bool) -> None:
    """Also where its loop was made one over a sequence to look at it."""
    found, plain = (
        compiled(Steps(snntorch.Leaky(beta=0.9, spike_grad=snntorch.surrogate.SSO()), still=still), fuse=fuse)
        for fuse in (True, False)
    )
    assert fused_in(found) == []
    assert "is not fused: it draws random numbers" in found.notices[0]
    assert text.print_fx(found.stages[0, 0].graph) == text.print_fx(plain.stages[0, 0].graph)


@pytest.mark.parametrize(
    "name",
    ["LIFCell", "LICell", "LIFAdExCell", "LIFBoxCell", "IAFCell", "LSNNCell", "LIFRefracCell", "LIFExCell"],
)
def test_cells_of_norse_are_fused(name: str) -> None:
    """Some make their first state by `torch.full(shape, parameter)`."""
    norse = pytest.importorskip("norse.torch")
    (node,) = fused_in(compiled(Steps(getattr(norse, name)())))
    assert node.target.way == "kernel"  # type: ignore[union-attr]
