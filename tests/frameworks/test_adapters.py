"""Adapters: what is a leaf, and that `infer` says what the real call returns."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import compat
from snnpart.errors import ConfigError
from snnpart.frameworks import adapter_for, is_leaf, preserved
from tests.frameworks.neurons import TRACED_THROUGH, every_case

EVERY = every_case()
CASES = {name: case for name, case in EVERY.items() if name not in TRACED_THROUGH}


def describe(value: Any) -> Any:
    """The structure of a result with each tensor's shape, dtype and whether it carries a gradient."""
    return pytree.tree_map(lambda v: (tuple(v.shape), v.dtype, v.requires_grad) if isinstance(v, Tensor) else v, value)


def same(got: Any, want: Any) -> None:
    assert pytree.tree_structure(describe(got)) == pytree.tree_structure(describe(want))
    assert describe(got) == describe(want)


@pytest.mark.parametrize("name", CASES)
def test_infer_is_what_the_call_returns(name: str) -> None:
    factory, inputs = CASES[name]
    module = factory()
    assert is_leaf(module)
    with preserved(module):
        real = module(*inputs)
    before = dict(vars(module))
    with compat.fake_mode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]
        inferred = adapter_for(module).infer(module, tuple(fakes), {})
    if inferred is NotImplemented:
        pytest.fail("infer does not know a neuron that it should")
    same(inferred, real)
    assert all(isinstance(t, compat.FakeTensor) for t in pytree.tree_leaves(inferred) if isinstance(t, Tensor))
    assert vars(module) == before


@pytest.mark.parametrize("name", [name for name in TRACED_THROUGH if name in EVERY])
def test_neurons_with_a_matrix_are_no_leaves(name: str) -> None:
    module = EVERY[name][0]()
    assert not is_leaf(module) and adapter_for(module).is_neuron(module)


@pytest.mark.parametrize("name", CASES)
def test_channels_given_are_channels_that_do_not_mix(name: str) -> None:
    """Changing one channel of the input changes only that channel of the output."""
    factory, (x, *rest) = CASES[name]
    module = factory().eval()
    adapter = adapter_for(module)
    dim = adapter.channel_dim(module, x.dim())
    if dim is None or rest and rest[0] is not None:
        pytest.skip("not cut by channels")
    assert dim != adapter.time_dim(module) and 0 < dim < x.dim()
    other = x.detach().clone()
    other.select(dim, 1).add_(1000.0)
    with preserved(module):
        one = pytree.tree_leaves(module(x))
    with preserved(module):
        two = pytree.tree_leaves(module(other))
    kept = torch.tensor([index for index in range(x.shape[dim]) if index != 1])
    assert torch.equal(one[0].index_select(dim, kept), two[0].index_select(dim, kept))
    assert any(not torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("name", CASES)
def test_outputs_lie_in_the_domain(name: str) -> None:
    factory, (x, *rest) = CASES[name]
    module = factory()
    domain = adapter_for(module).output_domain(module)
    with torch.no_grad():
        out = pytree.tree_leaves(module(x * 20, *rest))[0]
    assert domain.low <= float(out.min()) and float(out.max()) <= domain.high
    if domain.kind != "real":
        assert torch.equal(out, out.round())
    if domain.kind == "spike":
        assert set(out.unique().tolist()) <= {0.0, 1.0}


def test_torch_modules_that_are_leaves() -> None:
    assert is_leaf(nn.LSTM(3, 4)) and is_leaf(nn.GRUCell(3, 4))
    assert is_leaf(nn.MultiheadAttention(4, 2, dropout=0.1)) and is_leaf(nn.MultiheadAttention(4, 2, kdim=3))
    assert is_leaf(nn.MultiheadAttention(4, 2, add_zero_attn=True)) and not is_leaf(nn.MultiheadAttention(4, 2))
    assert is_leaf(torch.jit.script(nn.Linear(2, 2)))
    assert not is_leaf(nn.Linear(2, 2)) and not is_leaf(nn.Sequential())
    assert adapter_for(nn.Linear(2, 2)).name == "torch"


def test_no_framework_is_imported_unless_the_user_did() -> None:
    code = (
        "import sys, torch, snnpart.frameworks as f;"
        "assert not f.is_leaf(torch.nn.Linear(1, 1));"
        "f.reset_state(torch.nn.Linear(1, 1));"
        "print(sorted({'spikingjelly', 'snntorch', 'norse', 'sinabs'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_spikingjelly_containers_are_traced_through() -> None:
    pytest.importorskip("spikingjelly")
    from spikingjelly.activation_based import layer, neuron

    lif = neuron.LIFNode()
    recurrent = layer.LinearRecurrentContainer(lif, 3, 3)
    assert not is_leaf(recurrent) and not is_leaf(layer.Conv2d(1, 1, 1)) and not is_leaf(layer.BatchNorm2d(1))
    assert not is_leaf(layer.SeqToANNContainer(nn.Linear(1, 1)))
    assert not is_leaf(layer.Dropout()) and not is_leaf(layer.Dropout2d())
    assert is_leaf(layer.SynapseFilter()) and not adapter_for(layer.SynapseFilter()).is_neuron(layer.SynapseFilter())


def test_for_layout_sets_the_step_mode() -> None:
    pytest.importorskip("spikingjelly")
    from spikingjelly.activation_based import layer, neuron

    modules: list[nn.Module] = [neuron.LIFNode(), layer.Conv2d(1, 1, 1)]
    for module in modules:
        adapter_for(module).for_layout(module, True)
        assert module.step_mode == "m"
    assert adapter_for(modules[0]).time_dim(modules[0]) == 0
    adapter_for(modules[0]).for_layout(modules[0], False)
    assert adapter_for(modules[0]).time_dim(modules[0]) is None


def test_sinabs_squeeze_takes_the_local_batch() -> None:
    layers = pytest.importorskip("sinabs.layers")
    original = layers.LIFSqueeze(tau_mem=20.0, batch_size=4)
    x = torch.rand(12, 3) * 60
    whole = copy.deepcopy(original)(x)
    for size, example in ((2, 4), (6, 12)):
        lif = copy.deepcopy(original)
        adapter_for(lif).set_batch(lif, original, size, example)
        assert torch.equal(lif(x[:6]), whole[:6])
    with pytest.raises(ConfigError, match="5 rows are no whole number of samples: 12 rows were 4 samples"):
        adapter_for(lif).set_batch(lif, original, 5, 12)
