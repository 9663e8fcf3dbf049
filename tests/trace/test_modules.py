"""What is patched on nn.Module while tracing: modes, calls, autocast; and that everything is put back."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts, ops
from snnpart.errors import ConfigError, TraceError
from snnpart.trace import trace
from tests.neurons import LIF, Spike, data, fill
from tests.trace.parity import check, snapshot


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.4), nn.InstanceNorm1d(3), nn.AlphaDropout(0.3), nn.Dropout(0.4, inplace=True), nn.LayerNorm(4)],
)
def test_torchs_own_modules_do_not_specialise(layer: nn.Module, training: bool) -> None:
    graph = check(fill(nn.Sequential(nn.Linear(4, 4), layer)), data(2, 3, 4), training=training)
    assert not graph.training_specialised


class Old(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("training", [True, False])
def test_a_function_that_takes_only_a_bool_specialises(training: bool) -> None:
    graph = check(nn.Sequential(nn.Linear(4, 4), Old()).double(), data(3, 4), training=training)
    assert graph.training_specialised and [a.kind for a in graph.assumptions] == ["branch", "neuron"]


class Switches(nn.Module):
    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.l, self.mode = nn.Linear(4, 4), mode

    def forward(self, x: Tensor) -> Tensor:
        self.l.train(self.mode)
        return self.l(x)


def test_switching_modes_inside_forward_is_refused() -> None:
    model = fill(Switches(False))
    with pytest.raises(TraceError, match="switches a module between training and eval"):
        trace(model, data(3, 4))
    assert model.l.training is True
    check(fill(Switches(True)), data(3, 4))


class Mixed(nn.Module):
    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.l, self.enabled = nn.Linear(4, 4), enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=self.enabled):
            return Spike.apply(self.l(x))


def test_autocast_inside_forward() -> None:
    check(fill(Mixed(False)), data(3, 4))
    with pytest.raises(TraceError, match="autocast is switched on inside forward") as caught:
        trace(fill(Mixed(True)), data(3, 4))
    assert "test_modules.py" in str(caught.value)


def test_the_callers_modes_do_not_matter() -> None:
    model = fill(nn.Sequential(nn.Linear(4, 4), LIF()))
    with torch.no_grad():
        graph = trace(model, data(3, 4))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        other = trace(model, data(3, 4))
    assert str(graph.graph) == str(other.graph)
    assert all(facts.every(a) == facts.every(b) for a, b in zip(graph.graph.nodes, other.graph.nodes, strict=True))


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x).relu()
            top, where = y.max(1, keepdim=True)
        return self.b(x) * y + top * where


def test_no_grad_inside_forward_cuts_gradients() -> None:
    model = fill(Cut())
    graph = check(model, data(3, 4), others=data(5, 4))
    assert sum(node.target is torch.detach for node in graph.graph.nodes) == 1
    assert graph.tensors["a.weight"].used


def test_one_layer_is_not_a_network() -> None:
    with pytest.raises(ConfigError, match="the model is a single LSTM") as caught:
        trace(nn.LSTM(4, 4), data(3, 2, 4))
    assert "nn.Sequential" in str(caught.value)


class Opaque(nn.Module):
    """torch's own recurrent modules, and attention with extra keys, stay whole; nested state goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True)

    def forward(self, x: Tensor) -> Any:
        y, state = self.lstm(x)
        y, state = self.lstm(x + y[..., :4], state)
        z, weights = self.attention(y, y, value=y, need_weights=True)
        return z, weights, state[0]


def test_opaque_modules_are_leaves() -> None:
    graph = check(fill(Opaque()), data(3, 5, 4), others=data(6, 5, 4))
    calls = [(node.target, sorted(node.kwargs)) for node in graph.graph.nodes if node.op == "call_module"]
    assert calls == [("lstm", []), ("lstm", []), ("attention", ["need_weights", "value"])]
    assert graph.tensors["lstm.weight_ih_l0"].leaf == "lstm" and not graph.leaves["lstm"].neuron
    assert [o.batch_dim for o in graph.outputs] == [0, 0, 1]


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.twice = torch.compile(lambda x: x * 2 + 1, fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(self.twice(x))


def test_compiled_functions_are_traced_through() -> None:
    graph = trace(fill(Compiled()), data(3, 4))
    assert [node.target for node in graph.graph.nodes if node.op == "call_method"] == ["mul", "add"]


ARRAY = data(4).numpy()


class FromArray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) + torch.from_numpy(ARRAY)


def test_a_tensor_made_behind_the_tracers_back_is_a_constant() -> None:
    graph = check(fill(FromArray()), data(3, 4))
    assert graph.tensors["_constant0"].kind == "constant"
    (found,) = [a for a in graph.assumptions if a.kind == "constant"]
    assert "_constant0" in found.text and "test_modules.py" in found.place


class Parametrised(nn.Module):
    """Weights computed from others before each call, in all three ways of torch; one writes buffers with out=."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.c = nn.utils.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_parametrised_weights() -> None:
    model = Parametrised().double()
    model.c(data(3, 4))
    graph = trace(model, data(3, 4))
    assert graph.training_specialised  # spectral_norm asks for the mode
    written = sorted(str(node.args[0].target) for node in graph.graph.nodes if node.target is ops.assign)
    assert written == ["b.parametrizations.weight.0._u", "b.parametrizations.weight.0._v"]
    assert graph.tensors["c.weight_g"].used and "c.weight" not in graph.tensors


OUTSIDE = torch.ones(4, dtype=torch.float64, requires_grad=True)


class Foreign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * OUTSIDE


def test_a_trained_tensor_from_outside_is_refused() -> None:
    with pytest.raises(TraceError, match="requires grad but belongs to no module"):
        trace(Foreign(), data(3, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.again = self.a
        self.parts = [self.a, nn.Linear(4, 4).double()]

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[1](self.again(self.b(x))) + self.a(x)


def test_tied_and_unregistered_tensors() -> None:
    graph = check(fill(Tied()), data(3, 4))
    assert graph.tensors["a.weight"].aliases == ("b.weight", "again.weight")
    hidden = graph.tensors["parts.1.weight"]
    assert (hidden.kind, hidden.registered) == ("parameter", False)


class Asks(nn.Module):
    """A buffer read as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(self.steps)):
            x = x * 2
        return x


def test_a_buffer_may_be_read_as_a_number() -> None:
    graph = check(Asks(), data(3, 4), others=data(5, 4))
    (found,) = [a for a in graph.assumptions if a.kind == "constant"]
    assert "steps" in found.text and "test_modules.py" in found.place


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.n, self.log = nn.Linear(4, 4), LIF(), []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.n(self.l(x))
        self.seen += 1
        self.seen = self.seen + 1
        self.log.append(y)
        raise ValueError("no")


def test_everything_is_put_back_after_a_failure() -> None:
    model = fill(Fails())
    before = snapshot(model)
    patched = (nn.Module.__call__, nn.BatchNorm1d.forward, torch.autocast.__enter__, vars(nn.Module).get("training"))
    with pytest.raises(TraceError, match="ValueError: no"):
        trace(model, data(3, 4))
    assert snapshot(model) == before and model.log == [] and model.n.v is None
    assert patched == (
        nn.Module.__call__, nn.BatchNorm1d.forward, torch.autocast.__enter__, vars(nn.Module).get("training")
    )  # fmt: skip
    assert model.training is True


def test_a_wrong_shape_is_raised_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with pytest.raises(TraceError, match="forward failed on tensors without data"):
        trace(nn.Sequential(nn.Linear(5, 4), Old()), torch.zeros(3, 4))
    assert not caplog.records and not logger.disabled


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), Old())
    with pytest.raises(TraceError, match=r"parameter '0.weight' was made inside torch.inference_mode\(\)"):
        trace(model, torch.zeros(3, 4))


@torch.jit.script
def scripted_charge(x: Tensor, tau: float) -> Tensor:
    v = torch.zeros_like(x[0])
    steps = []
    for t in range(x.shape[0]):
        v = (1.0 - 1.0 / tau) * v + x[t] / tau
        steps.append(v)
    return torch.stack(steps)


def test_a_scripted_function_keeps_its_gradient() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Spike.apply(scripted_charge(self.a(x), 2.0) - 0.2))

    check(fill(Net()), data(3, 5, 4) * 2, in_dims=1, time_dims=0)


def test_a_scripted_method_of_a_module_that_no_module_registers_is_refused() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    doubled = torch.jit.script(Double())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return doubled.forward(self.a(x))

    with pytest.raises(TraceError, match=r"'aten\.mul\.Scalar' is called here below autograd") as caught:
        trace(fill(Net()), data(3, 4))
    assert "doubled.forward(self.a(x))" in str(caught.value)


def test_old_code_that_makes_variables() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            variable: Any = torch.autograd.Variable
            v, y = variable(torch.zeros(x.shape[0], 4, dtype=x.dtype)), self.a(x)
            v += 1
            return Spike.apply(v * y + variable(y * 2) - 0.2)

    check(fill(Net()), data(3, 4))
