"""A learned number in the plain attributes of several leaves is one tensor: its gradient is the sum of all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import load, parallelize, simulate

norse = pytest.importorskip("norse.torch")
NAME = "n1.p.tau_mem_inv"


class Net(nn.Module):
    """Two cells with the same parameter tuple, in which one number is learned; no module registers it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tau = (nn.Parameter(torch.tensor(500.0, dtype=torch.float64)),)
        p = norse.LIFParameters(tau_mem_inv=self.tau[0], tau_syn_inv=torch.tensor(300.0))
        self.a, self.n1, self.b, self.n2 = nn.Linear(4, 6), norse.LIFCell(p), nn.Linear(6, 5), norse.LIFCell(p)
        self.c = nn.Linear(5, 3)
        self.double()
        del self.tau

    def forward(self, xs: Tensor) -> Tensor:
        first, second, out = None, None, 0.0
        for x in xs:
            z, first = self.n1(4 * self.a(x), first)
            z, second = self.n2(6 * self.b(z), second)
            out = out + self.c(z)
        return out  # type: ignore[return-value]


def example() -> Tensor:
    torch.manual_seed(1)
    return torch.rand(6, 3, 4, dtype=torch.float64) * 3


def gradient(net: Any, x: Tensor) -> Tensor:
    net.n1.p.tau_mem_inv.grad = None
    net(x).sum().backward()
    found: Tensor = net.n1.p.tau_mem_inv.grad
    return found


@pytest.mark.parametrize("how", [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}])
def test_the_gradient_is_the_sum_over_the_leaves(how: dict[str, Any]) -> None:
    net, x = Net(), example()
    want = gradient(net, x)
    program = parallelize(net, example_inputs=x, in_dims=1, **how)
    got = simulate.run(program.compiled, (x,), training=True)
    got.outputs[0].sum().backward()
    found = got.gradients()
    assert found[NAME] is not None and want.abs() > 1e-6 and "n2.p.tau_mem_inv" not in found
    torch.testing.assert_close(found[NAME], want, rtol=1e-9, atol=0.0)


def test_both_leaves_learn_it_together(tmp_path: Path) -> None:
    net, x = Net(), example()
    want = net.n1.p.tau_mem_inv.detach() - 0.5 * gradient(net, x) / 3
    program = parallelize(net, example_inputs=x, in_dims=1)
    program.save(tmp_path / "p")
    for made in (program, load(tmp_path / "p")):
        running = made.launch(optimizer=partial(torch.optim.SGD, lr=0.5))
        running.train_step(x, torch.zeros(3), lambda out, _: out.sum() / 3)
        state = running.state_dict()
        running.close()
        for name in (NAME, "n2.p.tau_mem_inv"):
            torch.testing.assert_close(state[name], want, rtol=1e-12, atol=0.0)
