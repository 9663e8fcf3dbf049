"""Known results: a graph traced with them is the graph traced without, and they are as new tensors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.compat import FakeTensorMode, blank, fake_mode, storage_key
from snnpart.errors import TraceError
from snnpart.text import print_graph
from snnpart.trace import trace
from snnpart.trace.indexing import basic_view
from snnpart.trace.results import Results, may_be_known
from tests.neurons import data, fill
from tests.trace.parity import check
from tests.zoo import ZOO

NETS = (
    "handwritten_lif",
    "norse_lsnn",
    "plif_mnist-s",
    "recurrent",
    "sinabs_layers",
    "snntorch_rleaky",
    "tied",
    "unet",
)


@pytest.mark.parametrize("name", [name for name in NETS if name in ZOO])
def test_the_graph_is_the_one_traced_without_known_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = ZOO[name].build()
    with_them = print_graph(trace(module, inputs, **ZOO[name].dims))
    monkeypatch.setattr(Results, "of", lambda self, what, args, kwargs, run: (run(), False))
    monkeypatch.setattr("snnpart.trace.mode.basic_view", lambda x, index: None)
    assert print_graph(trace(module, inputs, **ZOO[name].dims)) == with_them


class Kept:
    """Torch functions on fake tensors, through one set of results."""

    def __init__(self) -> None:
        self.mode = fake_mode()
        self.results = Results(self.mode)

    def fake(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
        made = blank(self.mode, shape, torch.empty(shape).stride(), dtype, torch.device("cpu"))
        return made.requires_grad_() if grad else made

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, bool]:
        return self.results.of(function, args, kwargs, lambda: function(*args, **kwargs))


def looks(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad, type(x)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.add, (1,)),
        (torch.add, (True,)),
        (torch.add, (1.0,)),
        (torch.Tensor.to, (torch.float64,)),
        (torch.Tensor.sum, (0,)),
        (torch.Tensor.sum, ((0, 1),)),
        (torch.max, (1,)),
        (F.dropout, (0.5, True)),
        (torch.nn.functional.pad, ([1, 2],)),
        (torch.rand_like, ()),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_known_result_looks_like_a_computed_one(function: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    kept = Kept()
    for grad in (False, True) if dtype.is_floating_point else (False,):
        for shape in ((4, 3), (5, 3)):
            x = kept.fake(*shape, dtype=dtype, grad=grad)
            if dtype is torch.int64 and function in (F.dropout, torch.rand_like):
                continue
            first, known = kept(function, x, *args)
            again, known_again = kept(function, x, *args)
            assert (known, known_again) == (False, True)
            for one, other in zip(*(o if isinstance(o, tuple) else (o,) for o in (first, again)), strict=True):
                assert looks(one) == looks(other) and type(first) is type(again)
                assert storage_key(one) != storage_key(other)


def test_numbers_of_other_types_are_other_calls() -> None:
    kept = Kept()
    x = kept.fake(3, dtype=torch.int64)
    assert [kept(torch.mul, x, k)[0].dtype for k in (1, 1.0, True, 1, 1.0)] == [
        torch.int64, torch.float32, torch.int64, torch.int64, torch.float32,
    ]  # fmt: skip


def test_the_default_dtype_and_the_grad_mode_are_part_of_a_call() -> None:
    kept = Kept()
    x, weight = kept.fake(3, dtype=torch.int64), kept.fake(3, grad=True)
    assert kept(torch.mul, x, 1.0)[0].dtype is torch.float32 and kept(torch.mul, weight, 2)[0].requires_grad
    torch.set_default_dtype(torch.float64)
    try:
        assert kept(torch.mul, x, 1.0)[0].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        assert not kept(torch.mul, weight, 2)[0].requires_grad


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.Tensor.view, (12,)),
        (torch.Tensor.unbind, ()),
        (torch.Tensor.flatten, ()),
        (torch.Tensor.contiguous, ()),
        (torch.Tensor.to, (torch.float32,)),
        (torch.Tensor.expand, (2, 4, 3)),
        (torch.broadcast_tensors, ()),
        (torch.Tensor.is_set_to, ()),
    ],
)
def test_views_arguments_and_answers_are_made_anew(function: Any, args: tuple[Any, ...]) -> None:
    kept = Kept()
    x = kept.fake(4, 3)
    args = (x,) if function is torch.Tensor.is_set_to else args
    assert [kept(function, x, *args)[1] for _ in range(3)] == [False] * 3


def test_what_a_key_cannot_hold_is_computed() -> None:
    kept = Kept()
    x = kept.fake(4, 3)
    assert not any(kept(torch.mul, x, other=torch.ones(3))[1] for _ in range(2))
    assert not any(kept(torch.bernoulli, x, generator=torch.Generator())[1] for _ in range(2))
    with torch.inference_mode():
        assert not any(kept(torch.neg, x)[1] for _ in range(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not any(kept(torch.relu, x)[1] for _ in range(2))
    with kept.mode:
        three = torch.tensor(3.0)
    assert not any(kept(torch.add, three, 1)[1] for _ in range(2))


def test_only_torchs_own_functions_may_be_known() -> None:
    def own(x: Tensor) -> Tensor:
        return x

    assert all(may_be_known(f) for f in (torch.add, torch.Tensor.add, F.dropout, torch.Tensor.__rsub__, F.conv2d))
    assert not any(may_be_known(f) for f in (own, torch.Tensor.__getitem__, torch.ops.aten.add, torch.Tensor.T.__get__))


class Graphs(nn.Module):
    """Asks for autograd's graph, and writes in place into the results of repeated operations and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for _ in range(3):
            h = self.fc(x)
            assert not h.is_leaf and h.grad_fn is not None and h.requires_grad
            row = h[0]
            h.mul_(0.5)
            row += self.scale
            h[:, 1:].sub_(0.25)
            g = self.fc(x).detach() * 2
            assert g.is_leaf and g.grad_fn is None
            g[1] = self.scale
            total = total + h.relu_() * g
            total.unsqueeze_(0)
            total = total.squeeze(0)
        return total


def test_writes_into_known_results() -> None:
    check(fill(Graphs().double()), data(5, 4))


def test_a_flag_of_a_known_result_is_as_fixed_as_of_a_computed_one() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.fc(x)
            h = self.fc(x)
            h.requires_grad = False
            return h

    with pytest.raises(TraceError, match="you can only change requires_grad flags of leaf variables"):
        trace(Frozen(), torch.zeros(3, 4))


@pytest.mark.parametrize(
    "index", [0, -1, (slice(None), 1), (..., 2), (1, ..., slice(0, 2)), slice(1, None, 2), (slice(5, 9), 0), (0, 1, 2)]
)
def test_a_view_by_strides_is_torchs_view(index: Any) -> None:
    x = torch.arange(60).reshape(4, 3, 5).transpose(0, 1)[:, 1:]
    ours, theirs = basic_view(x, index), x[index]
    assert ours is not None and torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert not theirs.numel() or ours.data_ptr() == theirs.data_ptr()


@pytest.mark.parametrize(
    "index", [3, -4, (0, 0, 0, 0), None, [0, 1], torch.tensor(1), (..., ...), slice(None, None, -1), True, (0, None)]
)
def test_other_indices_are_left_to_torch(index: Any) -> None:
    assert basic_view(torch.zeros(3, 4, 5), index) is None
