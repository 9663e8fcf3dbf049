"""Loops whose steps run in the open: the neuron layers' own numbers, with what does not change computed once."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from snnpart import parallelize
from snnpart.frameworks import adapter_for
from snnpart.graph import Body
from snnpart.ops_time import Loop
from snnpart.scan import Opened, Scan
from tests.passes.rewrite.fold_time import nets
from tests.passes.rewrite.fold_time.parity import active, fold, images, traced

_NAMES = (
    "view _unsafe_view unbind select slice expand t transpose permute detach unsqueeze squeeze alias as_strided split "
    "split_with_sizes _reshape_alias"
)
_VIEWS = frozenset(_NAMES.split())


class Kernels(TorchDispatchMode):
    """Counts the operations that would be kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _VIEWS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def _kernels(step: Callable[[], Any]) -> Counter[str]:
    with Kernels() as found:
        step()
    return found.names


def _sum(outputs: Any) -> Tensor:
    found = (outputs,) if isinstance(outputs, Tensor) else outputs
    return torch.stack([one.square().mean() for one in found]).sum()


def _loop_step(module: nn.Module, x: Tensor) -> Callable[[], Any]:
    def step() -> None:
        module.zero_grad(set_to_none=True)
        _sum(module(x)).backward()

    return step


def _folded_step(module: nn.Module, x: Tensor) -> Callable[[], Any]:
    graph = fold(traced(module, (x,)))
    tensors = {name: (info.kind, info.tensor) for name, info in graph.tensors.items() if info.leaf is None}
    body = Body(tensors, {path: copy.deepcopy(leaf.module) for path, leaf in graph.leaves.items()})
    run = body.bind(graph.graph)

    def step() -> None:
        body.zero_grad(set_to_none=True)
        for layer in body.modules():
            adapter_for(layer).reset(layer)
        _sum(run(x)).backward()

    return step


def _scans(module: nn.Module, x: Tensor, **dims: Any) -> list[Opened | None]:
    """What became of each loop of the folded network, after one run."""
    graph = fold(traced(module, (x,), **dims))
    body = Body(
        {name: (info.kind, info.tensor) for name, info in graph.tensors.items() if info.leaf is None},
        {path: copy.deepcopy(leaf.module) for path, leaf in graph.leaves.items()},
    )
    scans: list[Scan] = []

    def bound(target: Any) -> Any:
        made = body.bound(target)
        if isinstance(made, Scan):
            scans.append(made)
        return made

    body.bind(graph.graph, bound)(x)
    return [one for scan in scans for one in scan._opened.values()]


def test_the_snntorch_net_launches_less_than_half_the_kernels() -> None:
    pytest.importorskip("snntorch")
    torch.manual_seed(0)
    module, x = active(nets.ConvLoop(25), torch.float32), images(2, 1, 10, 10, dtype=torch.float32)
    own, folded = _loop_step(module, x), _folded_step(module, x)
    folded()
    before, after = _kernels(own), _kernels(folded)
    assert sum(after.values()) * 2 < sum(before.values())
    layers = len([m for m in module.modules() if type(m).__name__ == "Leaky"])
    assert before["clamp"] == 25 * layers
    assert after["clamp"] <= 2 * layers  # once, and once in backward where beta is learned


@pytest.mark.parametrize(
    ("needs", "make", "shape", "dims"),
    [
        ("snntorch", lambda: nets.ConvLoop(5), (2, 1, 10, 10), {}),
        ("snntorch", lambda: nets.RLeakyLoop(5), (3, 5, 6), {"in_dims": 0, "time_dims": 1}),
        ("norse", lambda: nets.NorseLoop(5), (2, 1, 6, 6), {}),
        ("torch", lambda: nets.Residual(5), (2, 2, 5, 5), {}),
    ],
)
def test_the_steps_of_every_neuron_run_in_the_open(
    needs: str, make: Callable[[], nn.Module], shape: tuple[int, ...], dims: dict[str, Any]
) -> None:
    pytest.importorskip(needs)
    torch.manual_seed(0)
    module = active(make(), torch.float32)
    opened = _scans(module, images(*shape, dtype=torch.float32), **dims)
    assert opened and all(isinstance(one, Opened) for one in opened)


def test_a_layer_with_a_hook_or_with_hidden_state_stays_closed() -> None:
    snn = pytest.importorskip("snntorch")
    torch.manual_seed(0)
    module, x = active(nets.ConvLoop(3), torch.float32), images(2, 1, 10, 10, dtype=torch.float32)
    seen: list[Any] = []
    for layer in module.modules():
        if isinstance(layer, snn.Leaky):
            layer.register_forward_hook(lambda *args: seen.append(args[2]))
    assert _scans(module, x) == []
    assert len(seen) >= 3


class _Late(nn.Module):
    """A membrane with reset to zero whose spike is read at the next step: the first step differs in what it carries."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.fc, self.decay = steps, nn.Linear(4, 4), nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        v, out = torch.zeros_like(x), []
        for _ in range(self.steps):
            v = self.decay.clamp(0, 1) * v * (v < 1).to(v.dtype) + self.fc(x)
            out.append(torch.sigmoid(4 * (v - 1)))
        return torch.stack(out)


def test_what_nothing_carried_needs_runs_once_for_all_steps() -> None:
    torch.manual_seed(0)
    module, x = _Late(6).double(), images(3, 4)
    own, folded = _kernels(_loop_step(module, x)), _folded_step(module, x)
    folded()
    found = _kernels(folded)
    assert own["sigmoid"] == 6 and found["sigmoid"] == 1
    assert found["clamp"] == 1 and found["addmm"] == 1  # what parameters alone make is made once for all steps


def test_spikes_that_reset_at_the_next_step_are_made_for_all_steps_at_once() -> None:
    pytest.importorskip("snntorch")
    torch.manual_seed(0)
    module = active(nets.ConvLoop(5), torch.float32)
    for one in _scans(module, images(2, 1, 10, 10, dtype=torch.float32)):
        assert isinstance(one, Opened) and one._late
        assert len(one._kept) == 1  # the membrane: no more is stacked than the loop had results


def test_shapes_and_modes_are_opened_apart() -> None:
    torch.manual_seed(0)
    module = _Late(4).double()
    graph = fold(traced(module, (images(3, 4),)))
    loops = [node.target for node in graph.graph.nodes if isinstance(node.target, Loop)]
    assert len(loops) == 1
    body = Body({name: (info.kind, info.tensor) for name, info in graph.tensors.items()}, {})
    run = body.bind(graph.graph)
    for rows in (3, 5):
        x = images(rows, 4)
        assert torch.allclose(run(x)[0], module(x), atol=1e-12)
        with torch.no_grad():
            assert torch.allclose(run(x)[0], module(x), atol=1e-12)


def _gentle(x: Tensor, grad: Tensor, spikes: Tensor) -> Tensor:
    return grad / (1 + x.abs())


KEEPS_ITS_STATE = {
    "custom surrogate, Leaky": ("Leaky", 1, {"beta": 0.9, "spike_grad": _gentle}),
    "custom surrogate, Lapicque": ("Lapicque", 1, {"R": 5.1, "C": 1.0, "spike_grad": _gentle}),
    "custom surrogate, Synaptic": ("Synaptic", 2, {"alpha": 0.8, "beta": 0.9, "spike_grad": _gentle}),
    "custom surrogate, Alpha": ("Alpha", 3, {"alpha": 0.9, "beta": 0.8, "threshold": 0.2, "spike_grad": _gentle}),
    "custom surrogate, RLeaky": ("RLeaky", 2, {"beta": 0.9, "all_to_all": False, "spike_grad": _gentle}),
    "custom surrogate, RSynaptic": (
        "RSynaptic", 3, {"alpha": 0.8, "beta": 0.9, "all_to_all": False, "spike_grad": _gentle}),
    "reset at once, Leaky": ("Leaky", 1, {"beta": 0.9, "reset_delay": False}),
    "reset at once, Synaptic": ("Synaptic", 2, {"alpha": 0.8, "beta": 0.9, "reset_delay": False}),
    "reset at once, RLeaky": ("RLeaky", 2, {"beta": 0.9, "all_to_all": False, "reset_delay": False}),
    "no reset, Alpha": ("Alpha", 3, {"alpha": 0.9, "beta": 0.8, "threshold": 0.2, "reset_mechanism": "none"}),
}  # fmt: skip
"""snnTorch's layers that keep their state although they are given it, and whose first step is not like the others."""


class _Given(nn.Module):
    """A loop over time that gives a neuron layer the state that it returned, at first None."""

    def __init__(self, layer: Any, states: int) -> None:
        super().__init__()
        self.fc, self.layer, self.states = nn.Linear(4, 5), layer, states

    def forward(self, x: Tensor) -> Tensor:
        state, made = (None,) * self.states, []
        for now in x:
            out = self.layer(self.fc(now), *state)
            state = out[len(out) - self.states :]
            made.append(out[0])
        return torch.stack(made)


def _given(name: str) -> _Given:
    snn = pytest.importorskip("snntorch")
    kind, states, given = KEEPS_ITS_STATE[name]
    if "spike_grad" in given:
        given = {**given, "spike_grad": snn.surrogate.custom_surrogate(given["spike_grad"])}
    torch.manual_seed(0)
    net = active(_Given(getattr(snn, kind)(**given), states), torch.float32)
    assert isinstance(net, _Given)
    return net


def _gradients(net: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """What the module itself computes from a reset on: output, and gradients of its mean square."""
    for layer in net.modules():
        adapter_for(layer).reset(layer)
    net.zero_grad(set_to_none=True)
    y = net(x)
    y.square().mean().backward()
    return y.detach(), {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("name", KEEPS_ITS_STATE)
def test_trying_the_step_leaves_the_layers_state_alone(name: str) -> None:
    net = _given(name)
    program = parallelize(net, example_inputs=images(4, 2, 4, dtype=torch.float32), input_layout="TND", verify="full")
    with program.launch(device="cpu") as running:
        for samples in (2, 3, 3):
            x = images(4, samples, 4, dtype=torch.float32)
            y, gradients = _gradients(net, x)
            assert 0.01 <= float((y != 0).double().mean()) <= 0.99
            assert torch.allclose(running.eval_step(x), y, atol=1e-6)
            for _ in range(2):
                running.zero_grad()
                running.train_step(x, torch.zeros(samples), lambda out, _: out.square().mean())
                found = running.gradients()
                for key, wanted in gradients.items():
                    assert wanted is not None and torch.allclose(found[key], wanted, rtol=1e-5, atol=1e-6), key


HIDDEN: dict[str, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "None": lambda membrane: ((None,), {}),
    "a part": lambda membrane: ((membrane,), {}),
    "a part by name": lambda membrane: ((), {"mem": membrane}),
}


class _Partly(nn.Module):
    """A loop that gives a layer less than the state that it carries: the rest is what it kept itself."""

    def __init__(self, layer: Any, how: str) -> None:
        super().__init__()
        self.fc, self.layer, self.how = nn.Linear(4, 5), layer, how

    def forward(self, x: Tensor) -> Tensor:
        made, membrane = [], x.new_zeros(x.shape[1], 5)
        for now in x:
            args, kwargs = HIDDEN[self.how](membrane)
            out = self.layer(self.fc(now), *args, **kwargs)
            membrane = out[-1] if kwargs else out[1]
            made.append(out[0])
        return torch.stack(made)


@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("Leaky", {"beta": 0.9}),
        ("Synaptic", {"alpha": 0.8, "beta": 0.9}),
        ("Alpha", {"alpha": 0.9, "beta": 0.8, "threshold": 0.2}),
        ("RLeaky", {"beta": 0.9, "all_to_all": False}),
    ],
)
def test_state_that_a_layer_is_not_given_is_what_it_kept(kind: str, given: dict[str, Any], how: str) -> None:
    snn = pytest.importorskip("snntorch")
    torch.manual_seed(0)
    net = active(_Partly(getattr(snn, kind)(**given), how), torch.float32)
    x = images(5, 3, 4, dtype=torch.float32)
    program = parallelize(net, example_inputs=x, input_layout="TND", verify="full")
    y, gradients = _gradients(net, x)
    assert 0.01 <= float((y != 0).double().mean()) <= 0.99
    with program.launch(device="cpu") as running:
        for _ in range(2):
            running.zero_grad()
            running.train_step(x, torch.zeros(3), lambda out, _: out.square().mean())
            assert torch.allclose(running.eval_step(x), y, atol=1e-6)
            found = running.gradients()
            for key, wanted in gradients.items():
                assert wanted is not None and torch.allclose(found[key], wanted, rtol=1e-5, atol=1e-6), key


class _Draws(nn.Module):
    """A layer's step that draws random numbers and fails where it is told to, with its state beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.state = False, 0

    def forward(self, x: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        self.state += 1
        y = x * torch.rand_like(x)
        if self.fails:
            raise ValueError("no")
        return y, y if v is None else v + y


@pytest.mark.parametrize("fails", [False, True])
def test_trying_a_step_that_draws_or_fails_changes_nothing(fails: bool) -> None:
    layer, x = _Draws(), images(3, 4)
    layer.fails = fails
    step = torch.fx.Graph()
    given, v = step.placeholder("x"), step.placeholder("v")
    out = step.call_module("layer", (given, v))
    y, after = (step.call_function(operator.getitem, (out, at)) for at in (0, 1))
    step.output((after, y))
    scan = Scan(Loop(step, 3, ("all",)), Body({}, {"layer": layer}).bind, lambda path: layer)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="no") if fails else nullcontext():
        scan._open((x,), (), (None,))
    assert torch.equal(torch.get_rng_state(), before) and layer.state == 0
    assert list(scan._opened.values()) == ([] if fails else [None])
