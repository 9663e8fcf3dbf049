"""nn.MultiheadAttention written out: what torch's own function computes, for every way to call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart.gate import check_trace
from snnpart.trace import trace

LENGTH, OTHER = 5, 3
FAR = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)


class Net(nn.Module):
    def __init__(self, call: Callable[[Any, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.inner, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, **options)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.attention, self.inner(x))


CALLS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any]]] = {
    "self": (lambda a, x: a(x, x, x, need_weights=False)[0], {"batch_first": True}),
    "weights": (lambda a, x: a(x, x, x), {"batch_first": True}),
    "weights of heads": (lambda a, x: a(x, x, x, average_attn_weights=False), {"batch_first": True}),
    "without bias": (lambda a, x: a(x, x, x)[0], {"batch_first": True, "bias": False}),
    "time first": (lambda a, x: a(*(x.transpose(0, 1),) * 3)[0], {}),
    "one sample": (lambda a, x: torch.stack([a(y, y, y, need_weights=False)[0] for y in x.unbind(1)], 1), {}),
    "other keys": (lambda a, x: a(x, x[:, :OTHER], x[:, :OTHER].tanh(), need_weights=False)[0], {"batch_first": True}),
    "mask": (lambda a, x: a(x, x, x, attn_mask=FAR)[0], {"batch_first": True}),
    "mask, no weights": (lambda a, x: a(x, x, x, attn_mask=FAR, need_weights=False)[0], {"batch_first": True}),
    "causal": (
        lambda a, x: a(x, x, x, attn_mask=FAR, is_causal=True, need_weights=False)[0],
        {"batch_first": True},
    ),
    "numbers as mask": (lambda a, x: a(x, x, x, attn_mask=FAR.double() * -2)[0], {"batch_first": True}),
    "padding": (lambda a, x: a(x, x, x, key_padding_mask=x[:, :, 0] > 0.8)[0], {"batch_first": True}),
    "both": (
        lambda a, x: a(x, x, x, attn_mask=FAR, key_padding_mask=x[:, :, 0] > 9, need_weights=False)[0],
        {"batch_first": True},
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_it_computes_what_the_layer_computes(name: str, training: bool) -> None:
    torch.manual_seed(0)
    call, options = CALLS[name]
    net, x = Net(call, **options).double().train(training), torch.randn(4, LENGTH, 6, dtype=torch.float64)
    nn.init.normal_(net.attention.out_proj.weight)
    if net.attention.in_proj_bias is not None:
        nn.init.normal_(net.attention.in_proj_bias)
    dim = {"one sample": {"in_dims": 0, "out_dims": None}}.get(name, {})
    graph = trace(net, x, training=training, **dim)
    assert not graph.leaves and "attention.in_proj_weight" in graph.tensors
    report = check_trace(net, graph, x)
    assert max(report.traced.output, report.traced.gradient) < 1e-12
