"""Layers that are called again: steps of a loop over time, or a block whose weights are used again in depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts, parallelize
from snnpart.errors import PlanError
from snnpart.facts import TimeRole
from snnpart.ops_time import Loop
from snnpart.pass_manager import PassManager
from snnpart.passes.analyze import loops
from snnpart.passes.analyze.time import AnalyzeTime
from snnpart.passes.rewrite.canonicalize import Canonicalize
from snnpart.trace import trace
from tests.calibrate import fire
from tests.graphs import Wrap
from tests.lowering import assert_parity, rates
from tests.neurons import Spike

IMAGES = torch.randn(4, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Convolution, BatchNorm or not, spikes; `shortcut` is added before these."""

    is_neuron = True

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4) if norm else nn.Identity()

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        current = self.norm(self.conv(x))
        spikes: Tensor = Spike.apply((current if shortcut is None else current + shortcut) - 0.2)
        return spikes


def layers(norm: bool = True) -> dict[str, nn.Module]:
    made = {name: nn.Conv2d(4, 4, 1) for name in ("stem", "one", "two")}
    return {**made, "block": Block(norm), "head": nn.Linear(4, 3)}


def again(m: Any, x: Tensor) -> Any:
    return m.block(m.block(m.block(m.stem(x))))


def residual(m: Any, x: Tensor) -> Any:
    x = m.stem(x)
    for _ in range(3):
        x = x + m.block(x)
    return x


def between(m: Any, x: Tensor) -> Any:
    return m.block(m.two(m.block(m.one(m.block(m.stem(x))))))


def decoder(m: Any, x: Tensor) -> Any:
    """Each call reads another level of the encoder too."""
    low = m.one(x)
    high = m.two(low)
    return m.block(m.block(high) + low)


def branches(m: Any, x: Tensor) -> Any:
    return m.block(m.one(x)) * m.block(m.two(x))


def shortcut(m: Any, x: Tensor) -> Any:
    """A block adds its input before it spikes: the spike, which is not reset by it."""
    x = m.stem(x)
    for _ in range(3):
        x = m.block(x, x)
    return x


def threshold(m: Any, x: Tensor) -> Any:
    """The same, twice, with a learned threshold that both calls read."""
    x, least = m.stem(x), m.one.bias.view(1, -1, 1, 1)
    for _ in range(2):
        x = m.block(x, x.view(x.shape) - least)
    return m.one(x)


DEPTH = {f.__name__: f for f in (again, residual, between, decoder, branches, shortcut, threshold)}


def reset(m: Any, x: Tensor) -> Any:
    """The image is the first membrane only; spikes take from it."""
    v, out = m.stem(x), 0.0
    for _ in range(3):
        s = Spike.apply(v - 0.2)
        v = 0.9 * v - 0.1 * s
        out = out + m.one(s)
    return out


def recurrent(m: Any, x: Tensor) -> Any:
    """The image is the first membrane; a layer brings the spikes back, and they take from it, for two steps."""
    v = m.stem(x)
    for _ in range(2):
        s = Spike.apply(v - 0.2)
        v = 0.9 * v - 0.1 * s + m.one(s)
    return v


def static(m: Any, x: Tensor) -> Any:
    v, out = 0.0, 0.0
    for _ in range(2):
        v = 0.5 * v + m.stem(x)
        s = Spike.apply(v - 0.2)
        v, out = v - s.detach(), out + m.one(s)
    return out


def outside(m: Any, x: Tensor) -> Any:
    """What the first layer makes of the image is read at every step, and nothing resets."""
    v, out, current = 0.0, 0.0, m.stem(x)
    for _ in range(3):
        v = 0.5 * v + current
        out = out + m.one(Spike.apply(v - 0.2))
    return out


def feedback(m: Any, x: Tensor) -> Any:
    """A rate network: what a layer makes comes back to it, with the current."""
    h, current = torch.zeros_like(x), m.stem(x)
    for _ in range(4):
        h = torch.tanh(current + m.one(h))
    return h


def per_step(m: Any, x: Tensor) -> Any:
    """Another norm at every step."""
    out = 0.0
    for t in range(2):
        out = out + m.block((m.one, m.two)[t](m.stem(x)))
    return out


TIME = {
    "reset": (reset, 3),
    "recurrent": (recurrent, 2),
    "static": (static, 2),
    "outside": (outside, 3),
    "feedback": (feedback, 4),
    "per_step": (per_step, 2),
}


def network(body: Callable[..., Any], norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    net = Wrap(lambda m, x: m.head(body(m, x).mean((2, 3))), **layers(norm)).double()
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.6)
    return net


def length(net: nn.Module, x: Tensor, **how: Any) -> tuple[int, int]:
    """The steps of the loop that is found, and the groups that it calls at each."""
    graph = trace(net, (x,), **how)
    PassManager((Canonicalize(),)).run(graph)
    found = loops.find(graph)
    return found.length, len(found.groups)


@pytest.mark.parametrize("name", DEPTH)
def test_a_block_that_is_called_again_in_depth_is_no_loop(name: str) -> None:
    assert length(network(DEPTH[name]), IMAGES) == (1, 0)


@pytest.mark.parametrize("name", TIME)
def test_a_loop_is_one(name: str) -> None:
    body, steps = TIME[name]
    assert length(network(body), IMAGES)[0] == steps


def test_neurons_that_share_a_layer_but_no_state_are_no_loop() -> None:
    """snnTorch: one layer object serves for all, each with a membrane of its own."""
    snn = pytest.importorskip("snntorch")

    def one_step(m: Any, x: Tensor) -> Tensor:
        s, _ = m.lif(m.a(x), m.lif.init_leaky())
        s, _ = m.lif(m.b(s), m.lif.init_leaky())
        return m.lif(m.c(s), m.lif.init_leaky())[0]

    def three_steps(m: Any, x: Tensor) -> Tensor:
        mem, out = [m.lif.init_leaky() for _ in range(3)], 0.0
        for _ in range(3):
            s = x
            for i, layer in enumerate((m.a, m.b, m.c)):
                s, mem[i] = m.lif(layer(s), mem[i])
            out = out + s
        return out

    parts = {name: nn.Linear(4, 4) for name in "abc"}
    x = torch.rand(2, 4)
    assert length(Wrap(one_step, lif=snn.Leaky(beta=0.8), **parts), x) == (1, 0)
    assert length(Wrap(three_steps, lif=snn.Leaky(beta=0.8), **parts), x) == (3, 4)


def test_depth_in_frames_has_no_steps() -> None:
    """Two calls in a row over two frames in one tensor: the frames are the dim, not the calls."""
    graph = trace(Wrap(lambda m, x: m.fc(m.fc(x)), fc=nn.Linear(4, 4)), (torch.rand(2, 3, 4),), in_dims=1, time_dims=0)
    PassManager((Canonicalize(), AnalyzeTime())).run(graph)
    roles = [facts.need(node, TimeRole) for node in graph.graph.nodes if node.op == "call_function"]
    assert roles and all(role.dim == 0 and role.step is None for role in roles)


def loops_in(program: Any) -> int:
    return sum(isinstance(node.target, Loop) for node in program.compiled.source.graph.nodes)


@pytest.mark.parametrize("how", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}])
@pytest.mark.parametrize("name", DEPTH)
def test_shared_blocks_are_exact_on_every_topology(name: str, how: dict[str, int]) -> None:
    net = network(DEPTH[name])
    fire(net, lambda: net(IMAGES))
    assert all(0.01 <= rate <= 0.99 for rate in rates(net, (IMAGES,)))
    program = parallelize(net, example_inputs=IMAGES, **how)
    assert loops_in(program) == 0
    assert_parity(net, (IMAGES,), program.compiled)


def test_calls_of_a_block_without_norm_may_lie_on_different_stages() -> None:
    """Each stage then has its own copy of the weights, whose gradients are summed."""
    net = network(between, norm=False)
    program = parallelize(net, example_inputs=IMAGES, pp=2, split_at=["two"])
    assert "block.conv.weight" in program.plan.tied
    assert_parity(net, (IMAGES,), program.compiled)


def test_calls_with_a_shortcut_before_the_spike_may_lie_on_different_stages() -> None:
    def scaled(m: Any, x: Tensor) -> Any:
        x = m.stem(x)
        x = m.scale(m.block(x, x))
        return m.block(x, x)

    net = network(scaled, norm=False)
    net.scale = Wrap(lambda m, x: x * m.by, by=nn.Parameter(torch.full((4, 1, 1), 0.7, dtype=torch.float64)))
    fire(net, lambda: net(IMAGES))
    assert all(0.01 <= rate <= 0.99 for rate in rates(net, (IMAGES,)))
    program = parallelize(net, example_inputs=IMAGES, pp=2, split_at=["scale"])
    assert "block.conv.weight" in program.plan.tied
    assert_parity(net, (IMAGES,), program.compiled)


def test_a_cut_through_a_shared_block_with_averages_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="cannot be cut from 'block.norm.*\n.*they share a tensor"):
        parallelize(network(between), example_inputs=IMAGES, pp=2, split_at=["two"])
