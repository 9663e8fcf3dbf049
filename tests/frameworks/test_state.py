"""State: a reset starts a window, `preserved` puts everything back, and neither touches the user's tensors."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import parallelize
from snnpart.errors import TraceError
from snnpart.frameworks import adapter_for, preserved, reset_state
from snnpart.trace import trace
from tests.frameworks.neurons import every_case
from tests.neurons import SoftLIF

CASES = every_case()


def first(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    torch.manual_seed(3)
    out: Tensor = pytree.tree_leaves(module(*inputs))[0]
    return out.detach().clone()


@pytest.mark.parametrize("name", CASES)
def test_reset_brings_back_the_first_window(name: str) -> None:
    factory, inputs = CASES[name]
    module = factory()
    want = first(module, inputs)
    first(module, inputs)
    reset_state(module)
    assert torch.equal(first(module, inputs), want)


@pytest.mark.parametrize("name", CASES)
def test_reset_does_not_write_into_old_state(name: str) -> None:
    factory, inputs = CASES[name]
    module = factory()
    first(module, inputs)
    old = [t for t in pytree.tree_leaves([dict(vars(m)) for m in module.modules()]) if isinstance(t, Tensor)]
    values = [t.detach().clone() for t in old]
    reset_state(module)
    assert all(torch.equal(t, value) for t, value in zip(old, values, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_preserved_puts_everything_back_also_on_failure(name: str) -> None:
    factory, inputs = CASES[name]
    module = factory()
    module(*inputs)
    attributes = [(m, dict(vars(m)), dict(m._buffers), dict(m._parameters)) for m in module.modules()]
    state = [t for t in pytree.tree_leaves([a[1] for a in attributes]) if isinstance(t, Tensor)]
    values = [(t.detach().clone(), t.requires_grad, t.grad) for t in state]
    with pytest.raises(KeyError), preserved(module):
        reset_state(module)
        loss = sum(t.sum() for t in pytree.tree_leaves(module(*inputs)) if isinstance(t, Tensor) and t.requires_grad)
        loss.backward()  # type: ignore[union-attr]
        module.eval()
        module.extra = torch.ones(1)
        raise KeyError
    for m, attribute, buffers, parameters in attributes:
        assert vars(m).keys() == attribute.keys()
        assert all(vars(m)[key] is value for key, value in attribute.items())
        assert m._buffers == buffers and m._parameters == parameters
    for tensor, (value, requires_grad, grad) in zip(state, values, strict=True):
        assert torch.equal(tensor, value) and tensor.requires_grad == requires_grad and tensor.grad is grad


def test_preserved_keeps_batchnorm_statistics() -> None:
    """BatchNorm writes them without raising the tensor's version."""
    norm = nn.BatchNorm1d(3)
    mean: Any = norm.running_mean
    with preserved(norm):
        norm(torch.randn(8, 3) + 5)
        assert mean.abs().sum() > 0
    assert norm.state_dict()["num_batches_tracked"] == 0 and not mean.any()
    assert norm.running_mean is mean


def test_preserved_undoes_in_place_writes_into_state() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.total: Tensor
            self.register_buffer("total", torch.zeros(2))
            self.seen: list[Tensor] = []
            self.last = {"x": torch.zeros(2)}

        def forward(self, x: Tensor) -> Tensor:
            self.total += x * self.weight
            self.seen.append(x)
            self.last["x"].add_(1)
            return self.total

    module = Sum()
    total, seen, held = module.total, module.seen, module.last["x"]
    with preserved(module):
        module(torch.ones(2))
        assert module.total.grad_fn is not None
    assert module.total is total and not total.any() and total.grad_fn is None and not total.requires_grad
    assert module.seen is seen == [] and not held.any()


def test_hand_written_neurons_are_reset_by_their_own_method() -> None:
    net = nn.Sequential(nn.Linear(3, 4), SoftLIF())
    net(torch.randn(2, 3))
    assert net[1].mem is not None
    reset_state(net)
    assert net[1].mem is None


def test_a_parent_may_reset_its_children() -> None:
    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v: Any = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.v = self.v + x
            out: Tensor = self.v * 2
            return out

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.child = nn.Linear(2, 2), Child()

        def reset_states(self) -> None:
            self.child.v = 0.0

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.child(self.fc(x))
            return out

    net = Net()
    net(torch.ones(1, 2))
    reset_state(net)
    assert net.child.v == 0.0
    bare = nn.Sequential(nn.Linear(2, 2), Child())
    bare(torch.ones(1, 2))
    with pytest.raises(TraceError) as error:
        trace(bare, torch.ones(1, 2))
    text = str(error.value)
    assert "module '1'" in text and "'1.v' holds a tensor of an earlier forward, and is read here\n" in text
    assert "to mend it: give the module a reset() without arguments, or pass reset=f, called as f(model)" in text


def test_what_forward_replaces_unread_needs_no_reset() -> None:
    class Sets(nn.Module):
        """The state is set by a method of its own, which forward of the network calls."""

        def start(self, batch: int) -> None:
            self.v = torch.zeros(batch, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.v = 0.5 * self.v + x
            return self.v

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.neuron = nn.Linear(2, 2), Sets()

        def forward(self, x: Tensor) -> Tensor:
            self.neuron.start(x.shape[0])
            return torch.stack([self.neuron(self.fc(x)) for _ in range(2)])

    net = Net()
    net(torch.ones(3, 2))
    assert net.neuron.v.grad_fn is not None
    assert trace(net, torch.ones(4, 2)).batch_fixed == ""


def test_the_users_reset_comes_instead_of_all_else() -> None:
    net = nn.Sequential(nn.Linear(3, 4), SoftLIF())
    net(torch.randn(2, 3))
    calls: list[nn.Module] = []
    reset_state(net, calls.append)
    assert calls == [net] and net[1].mem is not None


def test_a_reset_that_initialises_weights_does_not_change_them() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.cache: Any = torch.zeros(3)

        def reset(self) -> None:
            nn.init.zeros_(self.weight)
            self.cache = None

    layer = Layer()
    reset_state(layer)
    assert layer.cache is None and bool((layer.weight == 1).all())


def test_a_model_that_was_just_run_can_be_reset_and_copied() -> None:
    """Casebook A24: membranes that carry a graph stop a deepcopy until they are reset."""
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    net = nn.Sequential(nn.Linear(3, 4), neuron.LIFNode(), nn.Linear(4, 2))
    x = torch.randn(2, 3)
    want = net(x)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(net)
    reset_state(net)
    assert torch.equal(copy.deepcopy(net)(x), want)


def test_a19_the_registry_of_instances_does_not_grow() -> None:
    snn = pytest.importorskip("snntorch")
    net = nn.Sequential(nn.Linear(3, 4), snn.Leaky(beta=0.9, init_hidden=True))
    before = len(snn.SpikingNeuron.instances)
    for _ in range(5):
        with preserved(net):
            reset_state(net)
            net(torch.randn(2, 3))
            adapter_for(net[1]).infer(net[1], (torch.randn(2, 4),), {})
        parallelize(net, tp=2, example_inputs=torch.randn(2, 3), time_steps=2).report()
    gc.collect()
    assert len(snn.SpikingNeuron.instances) == before


def test_state_of_an_inference_is_put_back() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("mem", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.mem = self.mem * 0.5 + x * self.weight
            return self.mem

    model = Counter()
    with torch.inference_mode():
        model(torch.ones(3))
    held = model.mem
    with preserved(model), torch.inference_mode():
        held.zero_()
    assert model.mem is held and held.tolist() == [1.0, 1.0, 1.0]


def test_a_class_wide_reset_inside_forward_reaches_this_model_only() -> None:
    """snnTorch's `utils.reset` walks all neurons of the process; others may hold anything."""
    snn, utils = pytest.importorskip("snntorch"), pytest.importorskip("snntorch.utils")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 5), snn.Leaky(beta=0.8, init_hidden=True), nn.Linear(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            utils.reset(self.body)
            return torch.stack([self.body(x) for _ in range(2)])

    other, net = Net(), Net()
    other.body[1].mem = held = torch.ones(7, 5)
    listed = list(snn.SpikingNeuron.instances)
    graph = trace(net, torch.ones(2, 4))
    assert graph.batch_fixed == "" and [leaf.neuron for leaf in graph.leaves.values()] == [True]
    assert other.body[1].mem is held and snn.SpikingNeuron.instances == listed
