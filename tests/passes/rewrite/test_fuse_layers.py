"""fuse-neurons over layers that take all steps in one call: samples first, steps merged with them, several results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sinabs.activation as activation
import torch
from sinabs import layers
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

from snnpart import text
from snnpart.compilation import Options, compile_program
from snnpart.frameworks import adapter_for
from snnpart.graph import Body
from snnpart.neuron_step import scan_of_leaf, trace_step
from snnpart.ops_fused import FusedNeuron, parts
from snnpart.program import CompiledProgram
from snnpart.runtime.kernels.fused_neuron import Fused
from snnpart.step_code import check_code
from tests.passes.rewrite.test_fuse_neurons import compiled, fused_in, lif
from tests.runtime.kernels.fused import Block, both, cases, errors, example
from tests.runtime.kernels.layers import First, Rows, Stacked

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LIF": lambda: Block(layers.LIF(tau_mem=3.0, norm_input=False), channels=6),
    "ALIF": lambda: Block(layers.ALIF(tau_mem=3.0, tau_adapt=4.0, tau_syn=2.0, norm_input=False), channels=6),
    "rows by samples": lambda: Rows(layers.IAFSqueeze(batch_size=4), channels=6),
    "rows by steps": lambda: Rows(layers.LIFSqueeze(tau_mem=3.0, num_timesteps=3), channels=6),
}


def ways(program: CompiledProgram) -> list[str]:
    return [node.target.way for node in fused_in(program)]  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2, "microbatches": 2}, {"neuron_dtype": "bf16"}])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_samples_first_are_fused_and_compute_what_they_did(name: str, options: dict[str, Any]) -> None:
    """The gate compares outputs, gradients and buffers of all ranks with the module's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(LAYERS[name](), LAYERS[name]()), torch.rand(4, 3, 6, 5, 5) * 2
    program, report = compile_program(model, x, Options(input_layout="NTCHW", fuse=True, **options))
    assert ways(program) == ["kernel"] * (2 * options.get("tp", 1)) and report is not None
    for node in fused_in(program):
        target: Any = node.target
        found = parts(target.region)
        assert target.steps == 3 and found.norm is not None and found.residual is not None
    written = text.print_fx(program.stages[0, 0].graph)
    assert text.print_fx(text.parse_fx(written)) == written


class Text(Body):
    """Runs the text of fused neurons' kernels in plain torch. To float64 no state is rounded."""

    def bound(self, target: Any) -> Any:
        bound = super().bound(target)
        fused = isinstance(target, FusedNeuron)
        return Fused(replace(target, state="float64"), self, bound)._rounded if fused else bound


@pytest.mark.parametrize("name", ["sinabs LIF", "sinabs rows by samples", "sinabs rows by steps", "Norse layer LIF"])
def test_the_text_of_the_kernels_computes_what_the_layer_does(name: str) -> None:
    """What `neuron_dtype=` runs on a CPU."""
    case = cases()[name]
    wanted, found, fused = both(case, example(case), dtype=case.dtype, kinds=(Body, Text))
    assert fused == 1 and 0.01 < float((wanted[0] - example(case)).abs().gt(0.5).double().mean()) < 0.99
    assert {key: value for key, value in errors(wanted, found).items() if value > 1e-5} == {}


@pytest.mark.parametrize("reset", [activation.MembraneSubtract(), activation.MembraneReset()])
@pytest.mark.parametrize("spikes", [activation.MultiSpike, activation.SingleSpike, activation.MaxSpike(3)])
@pytest.mark.parametrize("kind", ["SingleExponential", "Gaussian", "MultiGaussian", "PeriodicExponential", "Heaviside"])
def test_every_surrogate_of_sinabs_is_generated(kind: str, spikes: Any, reset: Any) -> None:
    given = {"spike_fn": spikes, "reset_fn": reset, "surrogate_grad_fn": getattr(activation, kind)()}
    step = trace_step(scan_of_leaf("neuron", layers.LIF(tau_mem=3.0, min_v_mem=-0.5, **given)), 3)
    check_code(step)
    assert step.states == 1 and any(node.op == "call_function" for node in step.next.backward.nodes)


def test_one_step_of_a_copy_leaves_the_layer_as_it_was() -> None:
    layer = layers.ALIF(tau_mem=3.0, tau_adapt=4.0, tau_syn=2.0)
    before = set(vars(layer))
    trace_step(scan_of_leaf("neuron", layer), 2)
    assert set(vars(layer)) == before and not layer.record_states


@pytest.mark.parametrize(("batch", "steps", "rows", "found"), [(2, None, 8, 4), (None, 3, 6, 3), (2, 4, 8, 4)])
def test_steps_of_rows(batch: int | None, steps: int | None, rows: int, found: int) -> None:
    layer = layers.IAFSqueeze(batch_size=batch, num_timesteps=steps)
    assert adapter_for(layer).merged_steps(layer, rows) == found
    assert adapter_for(layer).merged_steps(layers.IAF(), rows) is None


def test_a_recurrent_layer_of_sinabs_is_compiled() -> None:
    """Its step multiplies by a matrix."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = layers.LIFRecurrent(tau_mem=3.0, rec_connect=nn.Linear(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.neuron(x)  # type: ignore[no-any-return]

    program = compiled(Net(), 2, 4, 5, input_layout="NTC")
    assert ways(program) == ["compiled"]
    assert "is compiled, not generated: " in program.notices[0]


class One(nn.Module):
    """One step of a layer that keeps its state, outside any loop."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.neuron = nn.Conv2d(5, 5, 3, padding=1), neuron.IFNode()

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(self.conv(x))  # type: ignore[no-any-return]


def test_a_layer_that_takes_one_step_is_named() -> None:
    program = compiled(One(), 2, 5, 6, 6, input_layout="NCHW", neuron_dtype="bf16")
    assert fused_in(program) == []
    (notice,) = (str(item) for item in program.notices)
    assert "is not fused: it takes one step a call, outside any loop over time; its states are not rounded" in notice


@pytest.mark.parametrize("name", ["LIF", "LI", "IAF", "LIFAdEx", "LIFEx", "LSNN"])
def test_layers_of_norse_are_fused_where_their_state_is_not_read(name: str) -> None:
    norse = pytest.importorskip("norse.torch")
    program = compiled(First(getattr(norse, name)()))
    (node,) = fused_in(program)
    found = parts(node.target.region)  # type: ignore[union-attr]
    assert ways(program) == ["kernel"] and found.norm is not None and found.residual is not None


@pytest.mark.parametrize("method", ["super", "tanh", "triangle", "circ", "heavi_erfc"])
def test_every_surrogate_of_norse_is_generated(method: str) -> None:
    norse = pytest.importorskip("norse.torch")
    check_code(trace_step(scan_of_leaf("neuron", norse.LIF(norse.LIFParameters(method=method))), 3))


def test_a_neuron_without_gradient_is_compiled() -> None:
    """A kernel would give zeros, which an optimizer takes for a gradient."""
    norse = pytest.importorskip("norse.torch")
    program = compiled(First(norse.LIF(norse.LIFParameters(method="heaviside")), residual=False))
    assert ways(program) == ["compiled"] and "not generated: no gradient passes it" in program.notices[0]


class WithState(First):
    """A layer that is given its state, none, and whose result and state are read."""

    def forward(self, x: Tensor) -> Any:
        made, state = self.neuron(self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2]), None)
        return made, state.v


class Membranes(First):
    """Only what the neuron's state is at last is read."""

    def forward(self, x: Tensor) -> Any:
        return self.neuron(x)[1].v


class Apart(Stacked):
    """Each step's result is read by itself."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.neuron(x)
        return torch.stack(made[::-1])


def test_results_besides_the_first_leave_a_layer_alone() -> None:
    norse = pytest.importorskip("norse.torch")
    for model, reason in (
        (WithState(norse.LIF()), "other results than its first are used"),
        (Membranes(norse.LIF()), "other results than its first are used"),
        (Apart(neuron.NonSpikingIFNode()), "each step's result is used by itself"),
    ):
        program = compiled(model)
        assert fused_in(program) == []
        assert f"is not fused: {reason}" in program.notices[0]


def test_a_neuron_that_gives_each_step_by_itself_is_fused_where_they_are_stacked() -> None:
    assert ways(compiled(Stacked(neuron.NonSpikingLIFNode()))) == ["kernel"]
    program = compiled(First(neuron.NonSpikingIFNode(decode="last_mem"), residual=False))
    assert ways(program) == ["compiled"] and "its result is no sequence of its input's shape" in program.notices[0]


class Regrouped(Block):
    """The addition is in another grouping of the rows than the neuron's."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.neuron(self.norm(self.conv(x.flatten(0, 1))).unflatten(0, x.shape[:2])).flatten(0, 1)
        return (y.unflatten(0, (2, -1)) + x.flatten(0, 1).unflatten(0, (2, -1))).flatten(0, 1).unflatten(0, x.shape[:2])


@pytest.mark.parametrize(("make", "layout"), [(lif, "TNCHW"), (layers.IAF, "NTCHW")])
def test_an_addition_in_another_grouping_of_rows_stays_outside(make: Callable[[], nn.Module], layout: str) -> None:
    (node,) = fused_in(compiled(Regrouped(make()), 4, 3, 5, 6, 6, input_layout=layout))
    found = parts(node.target.region)  # type: ignore[union-attr]
    assert found.norm is not None and found.residual is None


def test_a_view_of_samples_over_steps_is_not_taken_for_a_still_image() -> None:
    """[1, T, ...] expanded over samples, where a loop's [1, N, ...] is expanded over steps."""

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = layers.IAF()

        def forward(self, x: Tensor) -> Tensor:
            return self.neuron(x.mean(0, keepdim=True).expand(x.shape)) + x  # type: ignore[no-any-return]

    program, report = compile_program(Same(), torch.rand(3, 4, 5) * 2, Options(input_layout="NTC", fuse=True))
    assert report is not None and [parts(n.target.region).shared for n in fused_in(program)] == [False]  # type: ignore[union-attr]
    assert ways(compiled(Block(lif()))) == ["kernel"]
