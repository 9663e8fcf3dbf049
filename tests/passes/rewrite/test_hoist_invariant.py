"""hoist-invariant: what is repeated over time is computed once, and everything comes out as before."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from snnpart import facts, ops
from snnpart.api import parallelize
from snnpart.frameworks import reset_state
from snnpart.graph import SpikeGraph
from snnpart.pass_manager import PassManager
from snnpart.passes import ANALYZE
from snnpart.passes.rewrite.canonicalize import Canonicalize
from snnpart.passes.rewrite.hoist_invariant import HoistInvariant
from snnpart.text import parse_graph, print_graph
from snnpart.trace import trace
from tests.calibrate import fire
from tests.lowering import assert_parity, compiled
from tests.neurons import BoxSpike
from tests.trace.parity import compare
from tests.zoo import ZOO

T = 3
NEEDS_SPIKINGJELLY = pytest.mark.skipif(importlib.util.find_spec("spikingjelly") is None, reason="needs SpikingJelly")


def hoisted(module: nn.Module, inputs: Any, **options: Any) -> SpikeGraph:
    graph = trace(module, inputs, **options)
    PassManager((Canonicalize(), HoistInvariant(), *ANALYZE)).run(graph)
    return graph


def made(graph: SpikeGraph) -> list[fx.Node]:
    """The nodes of the pass."""
    return [node for node in graph.graph.nodes if facts.origin(node).made_by == HoistInvariant.name]


def names(nodes: list[fx.Node]) -> list[str]:
    return [getattr(node.target, "__name__", str(node.target)) for node in nodes]


def images(graph: SpikeGraph, *targets: Any) -> dict[str, int]:
    """Number of samples that the operations of these targets compute, by the name of their weight."""
    found = {}
    for node in graph.graph.nodes:
        if node.target in targets:
            weight = next(item for item in node.all_input_nodes if item.op == "get_attr")
            found[str(weight.target)] = facts.need(node, facts.Value).shape[0]
    return found


class Lif(nn.Module):
    """A hand-written neuron that takes all steps in one call."""

    def __init__(self, steps: int = T) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        v, out = torch.zeros_like(x[0]), []
        for t in range(self.steps):
            v = 0.5 * v + x[t]
            spikes: Tensor = BoxSpike.apply(v - 0.3)
            v = v - spikes.detach() * 0.3
            out.append(spikes)
        return torch.stack(out)


class Stem(nn.Module):
    """Repeats an image, then convolution, norm, pooling and a neuron as multi-step networks have them."""

    def __init__(self, repeat: Callable[[Tensor], Tensor], momentum: float | None = 0.1, track: bool = True) -> None:
        super().__init__()
        self.repeat = repeat
        self.conv = nn.Conv2d(2, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5, momentum=momentum, track_running_stats=track)
        self.lif, self.head = Lif(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.repeat(x)
        y = F.max_pool2d(torch.relu(self.norm(self.conv(frames.flatten(0, 1)))), 2)
        spikes = self.lif(y.unflatten(0, (T, x.shape[0])))
        return self.head(spikes.mean((3, 4))).mean(0)


REPEATS: dict[str, Callable[[Tensor], Tensor]] = {
    "unsqueeze-repeat": lambda x: x.unsqueeze(0).repeat(T, 1, 1, 1, 1),
    "repeat": lambda x: x.repeat(T, 1, 1, 1, 1),
    "unsqueeze-expand": lambda x: x.unsqueeze(0).expand(T, -1, -1, -1, -1),
    "expand": lambda x: x.expand(T, *x.shape),
    "expand-contiguous": lambda x: x.expand(T, *x.shape).contiguous(),
    "index-none": lambda x: x[None].repeat(T, 1, 1, 1, 1),
    "stack": lambda x: torch.stack([x] * T),
    "cat": lambda x: torch.cat([x.unsqueeze(0)] * T),
    "tile": lambda x: torch.tile(x, (T, 1, 1, 1, 1)),
    "broadcast_to": lambda x: torch.broadcast_to(x, (T, *x.shape)),
    "merged": lambda x: x.repeat(T, 1, 1, 1).reshape(T, *x.shape),
    "cat-merged": lambda x: torch.cat([x] * T).unflatten(0, (T, -1)),
    "batch-first": lambda x: x.unsqueeze(1).repeat(1, T, 1, 1, 1).transpose(0, 1),
    "inside": lambda x: x.repeat_interleave(T, dim=0).unflatten(0, (-1, T)).permute(1, 0, 2, 3, 4),
    "scaled-before": lambda x: (x * 2 - 0.5).repeat(T, 1, 1, 1, 1),
    "scaled-after": lambda x: (x.repeat(T, 1, 1, 1, 1) - x.mean((0, 2, 3), keepdim=True)) / 0.5,
}


def image(count: int = 4) -> Tensor:
    return torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def firing(module: nn.Module) -> nn.Module:
    """In float64, with spikes at a rate between 0.01 and 0.99."""
    torch.manual_seed(0)
    seen: list[float] = []
    module.double()
    handle = next(m for m in module.modules() if isinstance(m, Lif)).register_forward_hook(
        lambda m, a, out: seen.append(float(out.detach().mean()))
    )
    module.eval()(image())
    handle.remove()
    assert 0.01 < seen[0] < 0.99
    return module.train()


@pytest.mark.parametrize("form", REPEATS)
def test_every_form_of_repetition(form: str) -> None:
    """The stem sees each image once, for every batch size, in both modes."""
    module = firing(Stem(REPEATS[form]))
    graph = hoisted(module, image())
    assert images(graph, torch.conv2d) == {"conv.weight": 4}
    assert images(graph, ops.batch_norm, ops.batch_norm_copies) == {"norm.weight": 4}
    assert {node.target for node in made(graph)} >= {torch.conv2d, ops.batch_norm_copies, torch.relu, torch.max_pool2d}
    for count in (4, 2, 7):
        for training in (True, False):
            compare(graph, module, image(count), training)


@pytest.mark.parametrize("options", [{"momentum": None}, {"track": False}, {"momentum": 1.0}], ids=str)
def test_kinds_of_batch_norm(options: dict[str, Any]) -> None:
    module = firing(Stem(REPEATS["repeat"], **options))
    graph = hoisted(module, image())
    for training in (True, True, False):
        compare(graph, module, image(), training)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(2, 3), (5, 3), (1, 3, 4), (1, 3), (4, 3, 2, 2)], ids=str)
def test_batch_norm_of_copies_is_that_of_all_copies_together(shape: tuple[int, ...], momentum: float | None) -> None:
    """Also of one number a channel, which alone has no variance; averages and counter over three updates."""
    torch.manual_seed(0)
    one = nn.BatchNorm1d(3, momentum=momentum).double()
    many = nn.BatchNorm2d(3, momentum=momentum).double() if len(shape) == 4 else one.__class__(3, momentum=momentum)
    many = many.double()
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = x.detach().repeat(T, *(1,) * (len(shape) - 1)).requires_grad_()
        weights = torch.randn(y.shape, dtype=torch.float64)
        tensors = (one.running_mean, one.running_var, one.num_batches_tracked)
        got = ops.batch_norm_copies(x, one.weight, one.bias, *tensors, True, momentum, one.eps, T)
        want = many(y)
        (got.repeat(T, *(1,) * (len(shape) - 1)) * weights).sum().backward()
        (want * weights).sum().backward()
        assert y.grad is not None
        torch.testing.assert_close(got, want.unflatten(0, (T, -1))[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(x.grad, y.grad.unflatten(0, (T, -1)).sum(0), rtol=0, atol=1e-10)
    for name, value in many.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, rtol=0, atol=1e-12)
    torch.testing.assert_close(one.weight.grad, many.weight.grad, rtol=0, atol=1e-10)


def test_one_image_of_one_pixel() -> None:
    """n = 1: the norm alone would refuse it, the T copies together it takes."""

    class Dot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.lif = nn.Linear(4, 3), nn.BatchNorm1d(3), Lif()

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.fc(x.repeat(T, 1, 1)).flatten(0, 1))
            return self.lif(y.unflatten(0, (T, -1)))

    torch.manual_seed(0)
    module, x = Dot().double(), torch.randn(4, 4, dtype=torch.float64)
    graph = hoisted(module, x)
    assert ops.batch_norm_copies in {node.target for node in made(graph)}
    for count in (4, 1):
        compare(graph, module, x[:count], True)


def test_a_users_own_frames_are_not_static() -> None:
    """[T, N, ...] given by the user may differ at every step."""

    class Given(Stem):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x.flatten(0, 1))).unflatten(0, x.shape[:2])
            return self.lif(y)

    module = Given(REPEATS["repeat"]).double()
    graph = hoisted(module, torch.randn(T, 2, 2, 6, 6, dtype=torch.float64), in_dims=1)
    assert made(graph) == []
    assert images(graph, torch.conv2d) == {"conv.weight": T * 2}


def test_repetition_ends_where_an_operand_varies() -> None:
    class Noisy(Stem):
        def forward(self, x: Tensor) -> Tensor:
            frames = x.repeat(T, 1, 1, 1, 1)
            current = self.conv(frames.flatten(0, 1)).unflatten(0, (T, -1))
            steps = torch.arange(T, dtype=x.dtype).reshape(T, 1, 1, 1, 1)
            masked = F.dropout(current, 0.5, self.training)
            return self.lif(masked + steps)

    module = Noisy(REPEATS["repeat"]).double()
    graph = hoisted(module, image())
    assert Counter(names(made(graph))) == {"conv2d": 1, "unsqueeze": 1, "expand": 1}
    for training in (True, False):
        compare(graph, module, image(), training)


def test_operations_of_every_kind() -> None:
    """Norms, reductions, joins, matrices, permutations and broadcasts over copies, alone and merged."""

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.lif = nn.Linear(6, 4), nn.LayerNorm((6, 6)), Lif()
            self.group = nn.GroupNorm(1, 2)
            self.weight, self.scale = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(1, 1, 2, 1, 1))
            self.deep = nn.Conv3d(2, 2, (1, 3, 3), padding=(0, 1, 1))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            frames = x.repeat(T, 1, 1, 1, 1) * self.scale
            alone = self.norm(frames).softmax(-1)
            rows = torch.cat([self.fc(alone), alone @ self.weight], -1)
            merged = self.group(frames.flatten(0, 1))
            padded = F.pad(F.interpolate(merged, scale_factor=2.0), (1, 1)).mean((2, 3), keepdim=True)
            sums = torch.stack([alone.sum((1, 2)), alone.amax((1, 2))], 0)
            pooled = F.avg_pool3d(frames.permute(0, 1, 3, 4, 2), (1, 2, 2)).squeeze(-1)
            deep = self.deep(x.repeat(T, 1, 1, 1).unsqueeze(2)).squeeze(2)
            spikes = self.lif(rows) + self.lif(padded.unflatten(0, (T, -1))).mean(-1, keepdim=True)
            return spikes, sums.movedim(1, 0), self.lif(pooled), self.lif(deep.view(T, -1, 2, 36))

    torch.manual_seed(0)
    module = Kinds().double()
    graph = hoisted(module, image(), out_dims=(1, 2, 1, 1))
    once = Counter(names(made(graph)))
    for name in ("layer_norm", "softmax", "linear", "matmul", "cat", "group_norm", "interpolate", "pad", "mean", "sum"):
        assert once[name] == 1, name
    assert once["amax"] == once["stack"] == once["avg_pool3d"] == once["conv3d"] == 1
    for training in (True, False):
        compare(graph, module, image(), training)


def test_the_copies_of_an_output_are_tensors_of_their_own() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.repeat(T, 1, 1, 1, 1) * 2).relu()

    graph = hoisted(Plain(), image(), out_dims=1)
    assert names(made(graph))[-1] == "contiguous"
    compare(graph, Plain(), image(), True)


def test_dims_that_are_reordered_across_the_copies_stay() -> None:
    """A reshape that mixes time with channels, and a norm over time, see all copies."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(2 * T), nn.Conv2d(2 * T, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            frames = x.unsqueeze(2).expand(-1, -1, T, -1, -1)
            return self.conv(self.norm(frames.reshape(-1, 2 * T, 6, 6)))

    module = Mixed().double()
    graph = hoisted(module, image())
    assert made(graph) == []
    compare(graph, module, image(), True)


def test_the_text_form_reads_back() -> None:
    graph = hoisted(firing(Stem(REPEATS["repeat"])), image())
    printed = print_graph(graph)
    assert "snnpart.ops.batch_norm_copies(" in printed
    assert print_graph(parse_graph(printed, modules=("tests",))) == printed


@pytest.mark.parametrize("how", [{"tp": 2}, {"pp": 2}, {"pp": 2, "microbatches": 2}], ids=str)
def test_under_channel_sharding_and_a_pipeline(how: dict[str, int]) -> None:
    module = firing(Stem(REPEATS["repeat"]))
    program = compiled(module, (image(),), **how)
    assert_parity(module, (image(),), program, microbatches=how.get("microbatches", 1))


class Repeated(nn.Module):
    """What users write around a network that takes [T, N, C, H, W]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.unsqueeze(0).repeat(T, 1, 1, 1, 1))
        return out.mean(0)


@NEEDS_SPIKINGJELLY
@pytest.mark.parametrize(
    ("name", "shape", "convolutions"),
    [
        ("small_sew-m", (2, 3, 16, 16), 1),
        ("spiking_vgg11_bn-m", (2, 3, 32, 32), 1),
        ("plif_mnist-m", (2, 1, 28, 28), 1),
        pytest.param("sew_resnet18-m", (2, 3, 32, 32), 1, marks=pytest.mark.all),
    ],
)
def test_networks_of_frames_given_a_static_image(name: str, shape: tuple[int, ...], convolutions: int) -> None:
    torch.manual_seed(0)
    module = Repeated(ZOO[name].factory()).double().train()
    x = torch.randn(shape, dtype=torch.float64)
    fire(module, lambda: module(x))
    reset_state(module)
    for training in (True, False):  # SpikingJelly's dropout makes a graph hold for one mode
        graph = hoisted(module, x, training=training)
        counts = Counter(images(graph, torch.conv2d).values())
        assert counts[2] == convolutions and ops.batch_norm_copies in {node.target for node in made(graph)}
        compare(graph, module, x, training)


@NEEDS_SPIKINGJELLY
@pytest.mark.parametrize(
    ("name", "convolutions"),
    [("spikformer", 1), ("qkformer", 1), ("ms_resnet", 2), ("spike_driven_transformer", 1)],
)
def test_networks_that_repeat_inside(name: str, convolutions: int) -> None:
    module, inputs = ZOO[name].build()
    graph = hoisted(module, inputs)
    assert Counter(images(graph, torch.conv2d).values())[2] == convolutions
    for training in (True, False):
        compare(graph, module, inputs, training)


def test_it_can_be_switched_off() -> None:
    module = firing(Stem(REPEATS["repeat"]))
    for hoist in (True, False):
        program = parallelize(module, example_inputs=image(), hoist=hoist)
        assert (HoistInvariant.name in [record.name for record in program.compiled.passes]) is hoist
        found = {node.target for node in program.compiled.source.graph.nodes}
        assert (ops.batch_norm_copies in found) is hoist
