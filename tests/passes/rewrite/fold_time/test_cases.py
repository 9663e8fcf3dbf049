"""Cases of the field: what folds, what stays and why, and what must not change by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import facts, parallelize
from snnpart.facts import Value
from snnpart.gate.observe import copies, observe_module
from snnpart.graph import BATCH_SIZE
from snnpart.ops_time import Loop, batch_norm_repeated, batch_norm_steps
from tests.graphs import calls
from tests.neurons import SoftLIF, spike
from tests.passes.rewrite.fold_time import nets
from tests.passes.rewrite.fold_time.parity import active, check, fold, images, run, traced


class Loop2(nn.Module):
    """A loop of `steps` over a body `function(module, x_t, state) -> (y, state)`; returns the stacked ys."""

    def __init__(self, function: Callable[..., Any], steps: int = 4, **layers: Any) -> None:
        super().__init__()
        self.function, self.steps = function, steps
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for t in range(self.steps):
            y, state = self.function(self, x[:, t], state)
            out.append(y)
        return torch.stack(out, 1)


def folded(function: Callable[..., Any], steps: int = 4, width: int = 6, **layers: Any) -> Any:
    """Fold such a loop, compare it with eager, and return the folded graph."""
    torch.manual_seed(0)
    net = active(Loop2(function, steps, **layers))
    return check(net, images(3, steps, width), fires=False, time_dims=1)


def lif(x: Tensor, v: Any) -> tuple[Tensor, Tensor]:
    v = x if v is None else 0.6 * v + x
    s = spike(v - 0.5)
    return s, v - 0.5 * s


def loops(graph: Any) -> list[Loop]:
    return [node.target for node in graph.graph.nodes if isinstance(node.target, Loop)]


# A02: leftover state


def test_state_left_over_from_a_call_does_not_matter() -> None:
    pytest.importorskip("snntorch")
    torch.manual_seed(3)
    net, x = active(nets.ConvLoop(5)), images(2, 1, 10, 10)
    fresh = net(x)[0].detach()
    graph = fold(traced(net, x))
    assert torch.equal(run(graph, x).outputs[0], fresh)
    assert torch.equal(run(graph, x).outputs[0], fresh)


def test_layers_that_take_all_steps_are_copies() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    net = active(nn.Sequential(nn.Linear(6, 5), neuron.LIFNode(), nn.Linear(5, 4), neuron.LIFNode()), scale=5.0)
    x = images(3, 6)
    net(x)
    left = net[1].v.clone()
    graph = check(net, x, time_steps=5)
    assert net[1].step_mode == "s" and torch.equal(net[1].v, left)
    assert [graph.leaves[path].module.step_mode for path in ("1", "3")] == ["m", "m"]
    assert graph.leaves["1"].module is not net[1]


# A08: statistics


def test_batch_norm_keeps_statistics_per_step() -> None:
    graph = folded(lambda m, x, v: lif(m.bn(m.fc(x)), v), fc=nn.Linear(6, 5), bn=nn.BatchNorm1d(5))
    assert len(calls(graph, batch_norm_steps)) == 1
    net = graph.tensors["bn.num_batches_tracked"]
    body, _ = copies(graph)
    body.bind(graph.graph)(images(3, 4, 6))
    assert int(body.get_buffer("bn.num_batches_tracked")) == 4 and int(net.tensor) == 0


def test_batch_norm_of_a_static_input_is_computed_once() -> None:
    torch.manual_seed(0)
    net = active(nets.Residual(5))
    graph = check(net, images(2, 2, 5, 5))
    assert len(calls(graph, batch_norm_repeated)) == 1
    want = observe_module(net, graph, images(2, 2, 5, 5))
    assert int(want.buffers["norms.0.num_batches_tracked"]) == 5


def test_batch_norm_in_eval_mode_is_one_call() -> None:
    torch.manual_seed(0)
    net = active(nets.Residual(5)).eval()
    check(net, images(2, 2, 5, 5), fires=False)


def test_one_norm_called_twice_a_step_keeps_the_order_of_its_updates() -> None:
    bn = nn.BatchNorm1d(6)
    graph = folded(lambda m, x, v: lif(m.bn(m.fc(m.bn(x))), v), fc=nn.Linear(6, 6), bn=bn)
    assert any(inner.name.startswith("batch_norm") for loop in loops(graph) for inner in loop.nodes())


# A20, A26, A27: layouts


class Squeeze(nn.Module):
    """A neuron that splits batch and time by a batch size of its own."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def forward(self, x: Tensor) -> Tensor:
        s = x.reshape(self.batch_size, -1, *x.shape[1:])
        v, out = torch.zeros_like(s[:, 0]), []
        for t in range(s.shape[1]):
            v = v + s[:, t]
            z = spike(v - 1.0)
            v = v - z.detach()
            out.append(z)
        return torch.stack(out, 1).flatten(0, 1)


class SqueezeNet(nn.Module):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.fc, self.s = nn.Linear(3, 4), Squeeze(batch)

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        return self.s(self.fc(x.flatten(0, 1))).unflatten(0, (n, t)).sum(1)


def test_a_loop_inside_a_layer_of_fixed_batch() -> None:
    torch.manual_seed(0)
    check(active(SqueezeNet(4)), images(4, 6, 3), time_dims=1)


class TimeFirst(nn.Module):
    """[N, T, C] in, [T, N, C] out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lif = nn.Linear(3, 4), SoftLIF()

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(1, 0, 2)
        return torch.stack([self.lif(self.fc(x[t])) for t in range(x.shape[0])])


@pytest.mark.parametrize("batch", [6, 4])
def test_batch_and_time_are_told_apart(batch: int) -> None:
    torch.manual_seed(0)
    graph = check(active(TimeFirst()), images(batch, 4, 3), time_dims=1)
    assert graph.outputs[0].batch_dim == 1
    assert _repeats(graph, "linear") == 1


class Casts(nn.Module):
    """Integer event frames, cast in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        v, out = None, []
        for t in range(x.shape[1]):
            s, v = lif(self.conv(x[:, t].to(self.conv.weight.dtype)), v)
            out.append(self.fc(s.flatten(1)))
        return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool])
def test_integer_frames(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    frames = (images(2, 5, 2, 4, 4) * 3).round().abs().to(dtype)
    graph = check(active(Casts()), frames, time_dims=1)
    assert _repeats(graph, "conv2d") == 1


def _repeats(graph: Any, name: str) -> int:
    return sum(getattr(node.target, "__name__", "") == name for node in graph.graph.nodes)


# A21: a loop whose body changes


class NormThroughTime(nn.Module):
    """One BatchNorm for every step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(6, 5), nn.Linear(5, 3)
        self.bns = nn.ModuleList(nn.BatchNorm1d(5) for _ in range(steps))

    def forward(self, x: Tensor) -> Tensor:
        v, out = None, []
        for bn in self.bns:
            s, v = lif(bn(self.fc(x)), v)
            out.append(self.out(s))
        return torch.stack(out)


def test_a_norm_for_every_step_stays_and_the_note_says_why() -> None:
    torch.manual_seed(0)
    net = active(NormThroughTime(4))
    graph = check(net, images(8, 6))
    assert _repeats(graph, "batch_norm") == 4 and _repeats(graph, "linear") == 2
    note = graph.notes["fold-time"]
    assert "stays as it is" in note and "bns.1" in note and "test_cases.py" in note


def test_numbers_that_change_with_the_step_stay() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            v, out = None, []
            for t in range(4):
                s, v = lif(self.fc(x), v)
                out.append(self.out(s) * (t + 1.5))
            return torch.stack(out)

    torch.manual_seed(0)
    graph = check(active(Weighted()), images(3, 6))
    assert _repeats(graph, "mul") == 4 and _repeats(graph, "linear") == 2
    assert "mul" in graph.notes["fold-time"]


# other forms of loops


def test_per_step_weights_indexed_by_the_step() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(6, 5), nn.Parameter(torch.randn(4))
            self.shift = nn.Parameter(torch.randn(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            v, out = None, []
            for t in range(4):
                s, v = lif(self.fc(x) * self.scale[t] + self.shift[t], v)
                out.append(s)
            return torch.stack(out)

    torch.manual_seed(0)
    graph = check(active(Weighted()), images(3, 6))
    assert _repeats(graph, "linear") == 1 and len(loops(graph)) == 1


def test_an_operation_that_mixes_samples_runs_step_by_step() -> None:
    graph = folded(lambda m, x, v: lif(m.fc(x) - m.fc(x).mean(0), v), fc=nn.Linear(6, 5))
    assert any(inner.name.startswith("mean") for loop in loops(graph) for inner in loop.nodes())
    assert "runs step by step" in graph.notes["fold-time"]


def test_delays_of_one_step_without_a_cycle() -> None:
    def body(m: Any, x: Tensor, state: Any) -> Any:
        v, before = state or (None, None)
        now = m.fc(x)
        s, v = lif(now if before is None else now + 0.5 * before, v)
        return s, (v, now)

    graph = folded(body, fc=nn.Linear(6, 5))
    assert _repeats(graph, "linear") == 1


def test_a_loop_after_a_loop() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 4), SoftLIF(), SoftLIF()

        def forward(self, x: Tensor) -> Tensor:
            y = torch.stack([self.one(self.a(x[:, t])) for t in range(4)]).mean(0)
            return torch.stack([self.two(self.b(y)) for _ in range(3)]).sum(0)

    torch.manual_seed(0)
    graph = check(active(Two()), images(3, 4, 6), time_dims=1)
    assert _repeats(graph, "linear") == 2 and len(loops(graph)) == 2


def test_final_states_and_single_steps_as_outputs() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Any:
            v, out = None, []
            for _ in range(4):
                s, v = lif(self.fc(x), v)
                out.append(s)
            return out[1], out[-1], v, v.sum()

    torch.manual_seed(0)
    check(active(Last()), images(3, 6), fires=False)


def test_the_folded_graph_takes_other_batches() -> None:
    pytest.importorskip("snntorch")
    torch.manual_seed(3)
    net = active(nets.ConvLoop(5))
    graph = fold(traced(net, images(2, 1, 10, 10)))
    x = images(7, 1, 10, 10)
    body, _ = copies(graph)
    sizes = [7] if any(node.target == BATCH_SIZE for node in graph.graph.nodes) else []
    got, want = body.bind(graph.graph)(x, *sizes), net(x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_steps_without_gradient_do_not_hide_the_one_that_has_it() -> None:
    """B12: rates are recorded under no_grad, then the same layers run once more and learn."""

    class Recorded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)

        def step(self, x: Tensor) -> Tensor:
            return spike(self.c(spike(self.b(spike(self.a(x))))))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                rate = torch.stack([self.step(x) for _ in range(2)]).mean(0)
            return self.step(x) + rate

    torch.manual_seed(0)
    net = active(Recorded())
    graph = check(net, images(3, 6), fires=False)
    linears = [node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "linear"]
    values = [facts.need(node.args[0], Value).requires_grad for node in linears]  # type: ignore[arg-type]
    assert values == [False, True, True], "a gradient goes back through the layers' inputs, though not at steps 0 and 1"
    parallelize(net, example_inputs=images(3, 6), tp=2, verify="full")


def test_what_is_computed_for_a_step_that_nobody_reads_carries_what_its_operands_carry() -> None:
    """The third step joins other values than the two under no_grad; a stage that sends the join must know of the
    gradient."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(9, 3)

        def step(self, x: Tensor) -> Tensor:
            spikes = spike(self.a(x))
            return spike(self.c(torch.cat([spikes.relu(), self.b(spikes)], 1)))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                rate = torch.stack([self.step(x) for _ in range(2)]).mean(0)
            return self.step(x) + rate

    class Seen(fx.Interpreter):
        wrong: list[str] = []

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return body.bound(target)(*args, **kwargs)

        def run_node(self, n: fx.Node) -> Any:
            made, value = super().run_node(n), facts.get(n, Value)
            if isinstance(made, Tensor) and value is not None and made.requires_grad and not value.requires_grad:
                self.wrong.append(n.name)
            return made

    torch.manual_seed(0)
    graph = check(active(Joined()), images(3, 6), fires=False)
    body, _ = copies(graph)
    Seen(body, graph=graph.graph).run(images(3, 6))
    assert not Seen.wrong
