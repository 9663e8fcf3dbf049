"""Copies of leaves, and leaves written as JSON and read back, compute what the originals compute."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart.errors import CheckpointError
from snnpart.frameworks import clone_leaf, decode_leaf, encode_leaf, leaf_packages, reset_state
from tests.frameworks.neurons import every_case

CASES = every_case()


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and persistent buffer that is not state, as a weights file holds them."""
    held = {**dict(module.named_parameters()), **{n: b for n, b in module.named_buffers() if n in module.state_dict()}}
    return {name: t.detach().clone() for name, t in held.items() if t.shape != (0,)}


def run(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Two calls from reset state: outputs of both, and the gradients of input and parameters."""
    torch.manual_seed(1)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    outputs = pytree.tree_leaves(module(*leaves)) + pytree.tree_leaves(module(*leaves))
    made = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    loss = sum(((out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum() for out in made), torch.zeros(()))
    learned: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, [leaves[0], *learned.values()], allow_unused=True)
    return outputs, dict(zip(["input", *learned], found, strict=True))


def assert_same(one: nn.Module, two: nn.Module, inputs: tuple[Any, ...]) -> None:
    reset_state(one)
    (a, grads), (b, others) = run(one, inputs), run(two, inputs)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert grads.keys() <= others.keys()
    for name, value in grads.items():
        other = others[name]
        assert (value is None and other is None) or torch.equal(value, other), name  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_a_clone_computes_the_same_and_shares_nothing(name: str) -> None:
    factory, inputs = CASES[name]
    module = factory()
    module(*inputs)
    copy = clone_leaf(module, {})
    assert type(copy) is type(module) and copy is not module
    pointers = {p.data_ptr() for p in module.parameters()}
    assert not pointers & {p.data_ptr() for p in copy.parameters()}
    assert_same(module, copy, inputs)


@pytest.mark.parametrize("name", CASES)
def test_a_leaf_comes_back_from_json(name: str) -> None:
    factory, inputs = CASES[name]
    module = factory()
    module(*inputs)
    text = json.dumps(encode_leaf(module), allow_nan=False)
    data = json.loads(text)
    again = decode_leaf(data, tensors_of(module))
    assert type(again) is type(module)
    assert encode_leaf(again) == data
    assert leaf_packages(data) <= {"spikingjelly", "snntorch", "norse", "sinabs", "torch", "builtins", "collections"}
    assert_same(module, again, inputs)


def test_given_tensors_are_taken_as_they_are() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    weight = nn.Parameter(torch.tensor(0.3))
    copy = clone_leaf(neuron.ParametricLIFNode(), {"w": weight})
    assert copy.w is weight


def test_tied_tensors_inside_a_leaf_stay_tied() -> None:
    snn = pytest.importorskip("snntorch")
    cell: Any = snn.RLeaky(beta=0.9, all_to_all=False, V=torch.rand(4))
    assert cell.V is cell.recurrent.V
    copy: Any = clone_leaf(cell, {})
    again: Any = decode_leaf(json.loads(json.dumps(encode_leaf(cell))), tensors_of(cell))
    for other in (copy, again):
        assert other.V is other.recurrent.V and other.V is not cell.V


def test_copies_do_not_stay_in_the_frameworks_registry() -> None:
    snn = pytest.importorskip("snntorch")
    gc.collect()
    cell = snn.Leaky(beta=0.9, learn_beta=True)
    before = len(snn.SpikingNeuron.instances)
    for _ in range(5):
        clone_leaf(cell, {})
        decode_leaf(encode_leaf(cell), tensors_of(cell))
    assert len(snn.SpikingNeuron.instances) == before


def test_bound_methods_belong_to_the_copy() -> None:
    snn = pytest.importorskip("snntorch")
    cell = snn.Leaky(beta=0.9)
    copy: Any = clone_leaf(cell, {})
    assert copy.state_function.__self__ is copy


def learning_lif() -> tuple[nn.Module, Tensor]:
    norse = pytest.importorskip("norse.torch")
    tau = torch.tensor([150.0, 250.0, 350.0], requires_grad=True)
    return norse.LIFCell(norse.LIFParameters(tau_mem_inv=tau)), tau


def test_a_copy_of_a_copy_is_a_copy() -> None:
    cell, _ = learning_lif()
    once = clone_leaf(cell, {})
    twice = clone_leaf(once, dict(once.named_parameters()))
    assert encode_leaf(twice) == encode_leaf(once) == encode_leaf(cell)
    assert len(twice._forward_pre_hooks) == 1
    assert dict(twice.named_parameters())["p.tau_mem_inv"] is dict(once.named_parameters())["p.tau_mem_inv"]


@pytest.mark.parametrize("how", ["clone", "read"])
def test_tensors_in_a_named_tuple_become_parameters_that_may_be_swapped(how: str) -> None:
    """As FSDP2 does it: the parameter object on the holder is replaced, and the next call uses the new one."""
    cell, tau = learning_lif()
    given = nn.Parameter(tau.detach().clone())
    data = json.loads(json.dumps(encode_leaf(cell)))
    copy = clone_leaf(cell, {"p.tau_mem_inv": given}) if how == "clone" else decode_leaf(data, {"p.tau_mem_inv": given})
    named = dict(copy.named_parameters())
    assert list(named) == ["p.tau_mem_inv"] and named["p.tau_mem_inv"] is given
    assert "p.v_th" in dict(copy.named_buffers()) and "p.v_th" not in copy.state_dict()
    x = torch.rand(2, 3) * 100
    state = copy(x)[1]
    assert torch.equal(state.v, cell(x)[1].v)
    other = nn.Parameter(torch.full((3,), 50.0))
    dict(copy.named_modules())["p"].tau_mem_inv = other
    spikes, state = copy(x, state)
    (gradient,) = torch.autograd.grad(state.v.sum(), [other])
    assert gradient.abs().sum() > 0
    assert isinstance(copy.p, type(cell.p)) and tau.grad is None


def test_hooks_on_parameters_work_on_the_copy() -> None:
    """Norse keeps neurons from exciting themselves by a hook on the gradient."""
    norse = pytest.importorskip("norse.torch")
    cell = norse.LIFRecurrentCell(3, 4)
    for copy in (clone_leaf(cell, {}), decode_leaf(encode_leaf(cell), tensors_of(cell))):
        state: Any = None
        for _ in range(20):
            spikes, state = copy(torch.full((2, 3), 300.0), state)
        state.v.sum().backward()
        gradient: Any = copy.get_parameter("recurrent_weights").grad
        assert torch.equal(gradient.diagonal(), torch.zeros(4)) and gradient.abs().sum() > 0


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True),
        lambda: nn.GRUCell(3, 4),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    ],
)
def test_torch_leaves(module: Any) -> None:
    made = module()
    x = (
        torch.randn(2, 3, made.linear1.in_features) if hasattr(made, "self_attn") else torch.randn(2, 3)
    ).requires_grad_()
    x = torch.randn(2, 5, 3, requires_grad=True) if isinstance(made, nn.LSTM) else x
    mine = {name: nn.Parameter(p.detach().clone()) for name, p in made.named_parameters()}
    copy = clone_leaf(made, mine)
    assert dict(copy.named_parameters()) == mine
    assert_same(made, copy, (x,))
    assert_same(made, decode_leaf(json.loads(json.dumps(encode_leaf(made))), tensors_of(made)), (x,))


def test_script_modules_are_copied_but_not_written() -> None:
    script = torch.jit.script(nn.Linear(3, 2))
    weight = nn.Parameter(torch.ones(2, 3))
    copy = clone_leaf(script, {"weight": weight})
    x = torch.randn(4, 3)
    copy(x).sum().backward()
    assert weight.grad is not None and script.weight.grad is None
    with pytest.raises(CheckpointError, match="is a ScriptModule"):
        encode_leaf(script)


class Custom(nn.Module):
    """A user's own leaf class with something that has no name."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function


NAMELESS = lambda x: x


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(CheckpointError) as error:
        encode_leaf(Custom(NAMELESS))
    assert str(error.value) == (
        "neuron layer of class Custom: 'function' is <lambda> of module tests.frameworks.test_leaves, which cannot be "
        "imported by that name\n  to mend it: use a class or function that can be imported by name, or plain data"
    )


def test_objects_and_hooks_that_cannot_be_written() -> None:
    import threading

    with pytest.raises(CheckpointError, match="'function' is of type lock, which cannot be written"):
        encode_leaf(Custom(threading.Lock()))
    hooked = Custom(None)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(CheckpointError, match="has hooks"):
        encode_leaf(hooked)


@pytest.mark.parametrize(
    "path",
    ["os:system", "torch:load", "torch:os.system", "torch.hub:load", "builtins:eval", "subprocess:Popen", "tests:x"],
)
def test_reading_imports_only_from_allowed_packages(path: str) -> None:
    data = encode_leaf(Custom(torch.relu))
    data["attributes"]["function"] = {"kind": "import", "path": path}
    with pytest.raises(CheckpointError, match="may not be imported|cannot be imported"):
        decode_leaf(data, {}, modules=["tests"])


def test_classes_of_other_packages_need_to_be_allowed() -> None:
    data = encode_leaf(Custom(torch.relu))
    with pytest.raises(CheckpointError, match="tests.frameworks.test_leaves:Custom may not be imported"):
        decode_leaf(data, {})
    assert decode_leaf(data, {}, modules=leaf_packages(data)).function is torch.relu


def test_missing_tensors_and_damage_are_named() -> None:
    cell = nn.LSTMCell(3, 40)
    with pytest.raises(CheckpointError, match="the tensor 'weight_ih' of a neuron layer is missing"):
        decode_leaf(encode_leaf(cell), {})
    data = encode_leaf(cell)
    del data["attributes"]
    with pytest.raises(CheckpointError, match="damaged"):
        decode_leaf(data, tensors_of(cell))


def test_a_changed_package_is_refused() -> None:
    snn = pytest.importorskip("snntorch")
    from snntorch import surrogate

    cell = snn.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid(slope=25))
    data = encode_leaf(cell)
    assert data["attributes"]["spike_grad"]["cells"] == [25]
    data["attributes"]["spike_grad"]["name"] = "fast_sigmoid.<locals>.other"
    with pytest.raises(CheckpointError, match="is not the one that was saved"):
        decode_leaf(data, tensors_of(cell))
