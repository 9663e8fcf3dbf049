"""A learned number in the plain attributes of leaves is one tensor: its gradient is the sum over all that hold it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import load, parallelize, simulate
from snnpart.text import parse_graph, print_graph

norse = pytest.importorskip("norse.torch")
HOW = [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}]
PLAIN = ["n1.p.tau_mem_inv", "n2.p.tau_mem_inv"]


class Net(nn.Module):
    """Two cells with the same parameter tuple, in which one number is learned."""

    tau: nn.Parameter
    keeper: nn.Module
    taus: tuple[nn.Parameter, ...]

    def __init__(self, held: str = "nowhere", size: tuple[int, ...] = (), read: bool = False, cells: int = 2) -> None:
        """`held`: what else holds the number (the `model`, a `module`, a `tuple`); `read`: forward reads it as well."""
        super().__init__()
        torch.manual_seed(0)
        tau = nn.Parameter(torch.full(size, 500.0, dtype=torch.float64))
        self.read = read
        if held == "model":
            self.tau = tau
        elif held == "module":
            self.keeper = nn.Module()
            self.keeper.tau = tau
        elif held == "tuple":
            self.taus = (tau,)
        p = norse.LIFParameters(tau_mem_inv=tau, tau_syn_inv=torch.tensor(300.0))
        other = p._replace(tau_mem_inv=torch.tensor(500.0, dtype=torch.float64))
        self.a, self.n1 = nn.Linear(4, 6), norse.LIFCell(p)
        self.b, self.n2 = nn.Linear(6, 6), norse.LIFCell(p if cells == 2 else other)
        self.c = nn.Linear(6, 3)
        self.double()

    def forward(self, xs: Tensor) -> Tensor:
        first, second, out = None, None, 0.0
        for x in xs:
            z, first = self.n1(4 * self.a(x), first)
            z, second = self.n2(6 * self.b(z), second)
            out = out + self.c(z)
        return out * (self.tau / 400).square() if self.read else out  # type: ignore[operator,return-value]


CASES: dict[str, Callable[[], Net]] = {
    "n1.p.tau_mem_inv": Net,
    "taus.0": partial(Net, "tuple"),
    "tau": partial(Net, "model"),
    "keeper.tau": partial(Net, "module"),
    "tau, one cell": partial(Net, "model", cells=1),
    "tau, also read": partial(Net, "model", read=True),
    "tau, also read, one cell": partial(Net, "model", read=True, cells=1),
    "tau, of each channel": partial(Net, "model", size=(6,)),
}


def example() -> Tensor:
    torch.manual_seed(1)
    return torch.rand(6, 3, 4, dtype=torch.float64) * 3


def gradient(net: Any, x: Tensor) -> Tensor:
    number = net.n1.p.tau_mem_inv
    number.grad = None
    net(x).sum().backward()
    found: Tensor = number.grad
    return found


def fires(net: nn.Module, x: Tensor) -> bool:
    seen: dict[nn.Module, list[Tensor]] = {net.get_submodule(name): [] for name in ("n1", "n2")}
    handles = [cell.register_forward_hook(lambda cell, _, out: seen[cell].append(out[0].detach())) for cell in seen]
    net(x)
    for handle in handles:
        handle.remove()
    return all(0.01 < torch.stack(spikes).mean() < 0.99 for spikes in seen.values())


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_the_sum_over_all_that_hold_it(case: str, how: dict[str, Any]) -> None:
    net, x = CASES[case](), example()
    assert fires(net, x)
    want, name = gradient(net, x), case.partition(",")[0]
    program = parallelize(net, example_inputs=x, in_dims=1, verify="off" if how else "full", **how)
    got = simulate.run(program.compiled, (x,), training=True)
    got.outputs[0].sum().backward()
    found = got.gradients()
    assert want.abs().min() > 1e-6 and not [key for key in found if "tau" in key and key != name]
    torch.testing.assert_close(found[name], want, rtol=1e-9, atol=0.0)
    torch.testing.assert_close(got.outputs[0], net(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", HOW[1:], ids=str)
def test_ranks_pass_the_gate(how: dict[str, Any]) -> None:
    program = parallelize(Net("model"), example_inputs=example(), in_dims=1, verify="full", **how)
    held = [part for stage in program.compiled.stages.values() for part in stage.tensors if part.name == "tau"]
    assert [part.partial_gradient for part in held] == [how.get("tp") == 2] * how.get("tp", 1)


def test_a_cell_stays_whole_whose_number_forward_reads_too() -> None:
    program = parallelize(Net("model", read=True), example_inputs=example(), in_dims=1, tp=2)
    assert "forward also reads 'tau', which learns, outside the layer" in program.report().text(width=300)


@pytest.mark.parametrize("case", CASES)
def test_all_that_hold_it_learn_it_together(case: str, tmp_path: Path) -> None:
    net, x, name = CASES[case](), example(), case.partition(",")[0]
    want = net.n1.p.tau_mem_inv.detach() - 0.5 * gradient(net, x) / 3
    program = parallelize(net, example_inputs=x, in_dims=1, verify="off")
    program.save(tmp_path / "p")
    for made in (program, load(tmp_path / "p")):
        running = made.launch(optimizer=partial(torch.optim.SGD, lr=0.5))
        running.train_step(x, torch.zeros(3), lambda out, _: out.sum() / 3)
        state, learned = running.state_dict(), running.eval_step(x)
        running.close()
        torch.testing.assert_close(state[name], want, rtol=1e-12, atol=0.0)
        mine = CASES[case]()
        missing, unexpected = mine.load_state_dict(state, strict=False)
        mine.n1.p.tau_mem_inv.data.copy_(want)
        assert not missing and all("tau" in key and name not in mine.state_dict() for key in unexpected)
        torch.testing.assert_close(learned, mine(x), rtol=1e-9, atol=1e-12)
        again = made.launch(optimizer=None)
        again.load_state_dict(state)
        torch.testing.assert_close(again.eval_step(x), learned, rtol=1e-12, atol=0.0)
        again.close()


@pytest.mark.parametrize(("held", "keys"), [("nowhere", PLAIN), ("tuple", ["taus.0", *PLAIN]), ("model", ["tau"])])
def test_the_state_has_the_keys_of_the_users(held: str, keys: list[str]) -> None:
    net = Net(held)
    program = parallelize(net, example_inputs=example(), in_dims=1, verify="off")
    running = program.launch(optimizer=None)
    state = running.state_dict()
    running.close()
    assert [key for key in state if "tau" in key] == keys
    assert held != "model" or list(state) == list(net.state_dict())


def test_the_text_keeps_which_names_no_module_registers() -> None:
    source = parallelize(Net("model"), example_inputs=example(), in_dims=1, verify="off").compiled.source
    info = source.tensors["tau"]
    assert info.aliases == info.plain == tuple(PLAIN) and info.keys == ("tau",) and info.leaf is None and info.used
    read = parse_graph(print_graph(source)).tensors["tau"]
    assert (read.aliases, read.plain, read.keys, read.used) == (info.aliases, info.plain, ("tau",), True)
