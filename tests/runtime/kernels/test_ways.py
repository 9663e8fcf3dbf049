"""Which way a fused neuron runs: measured once, kept in a file; what torch.compile makes of a region is the region."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

from snnpart import facts
from snnpart.compilation import Options, compile_program
from snnpart.facts import Value
from snnpart.ops_fused import FusedNeuron
from snnpart.runtime.kernels import fused_neuron
from snnpart.runtime.kernels.choices import Choices, cuda_seconds
from snnpart.runtime.kernels.fused_neuron import Fused
from snnpart.runtime.kernels.ways import Region, fastest, kind_of
from snnpart.runtime.stage import StageModule
from tests.passes.rewrite.test_fuse_neurons import Mixing, lif
from tests.runtime.kernels.fused import Block, Steps


class Timer:
    """Takes as long as the table says for each way, in turn; runs them."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.calls = list(seconds), 0

    def __call__(self, way: Callable[[], Any]) -> float:
        way()
        self.calls += 1
        return self.seconds[self.calls - 1]


def refuses() -> None:
    raise RuntimeError("no kernel")


NOTHING: dict[str, Callable[[], Any]] = {"kernel": lambda: 0, "compiled": lambda: 0, "plain": lambda: 0}


def test_the_fastest_way_is_measured_once_and_kept(tmp_path: Path) -> None:
    path, timer = tmp_path / "cache" / "ways.json", Timer(3e-6, 2e-6, 5e-6)
    first = Choices(path, timer)
    assert [first.choose("a", NOTHING), first.choose("a", NOTHING)] == ["compiled", "compiled"]
    assert json.loads(path.read_text())["a"]["microseconds"] == {"kernel": 3.0, "compiled": 2.0, "plain": 5.0}
    assert Choices(path, refuses).choose("a", NOTHING) == "compiled"  # type: ignore[arg-type]
    assert timer.calls == 3


def test_a_way_that_raises_is_none(tmp_path: Path) -> None:
    choices = Choices(tmp_path / "ways.json", Timer(2e-6, 3e-6))
    assert choices.choose("a", {**NOTHING, "kernel": refuses}) == "compiled"
    assert choices.choose("b", {"kernel": refuses, "plain": refuses}) == "kernel"


def test_what_another_process_kept_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "ways.json"
    one, other = Choices(path, Timer(1e-6, 2e-6, 3e-6)), Choices(path, Timer(3e-6, 2e-6, 1e-6))
    assert (one.choose("a", NOTHING), other.choose("b", NOTHING)) == ("kernel", "plain")
    assert set(json.loads(path.read_text())) == {"a", "b"}
    assert one.known("b") == "plain"


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}'])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ways.json"
    path.write_text(text)
    assert Choices(path, Timer(1e-6, 2e-6, 3e-6)).choose("a", NOTHING) == "kernel"
    assert json.loads(path.read_text())["a"]["way"] == "kernel"


def test_a_cache_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    choices = Choices(tmp_path / "file" / "ways.json", Timer(1e-6, 2e-6, 3e-6))
    assert [choices.choose("a", NOTHING), choices.choose("a", NOTHING)] == ["kernel", "kernel"]


def fused(model: nn.Module, x: Tensor, **options: Any) -> tuple[FusedNeuron, StageModule]:
    """The fused neuron of a network, and a module over its tensors and leaves."""
    given = Options(input_layout="TNCHW", verify="off", **options)
    program, _ = compile_program(model, x, given)
    stage = program.stages[0, 0]
    held = {
        part.name: (part.kind, program.source.tensors[part.name].tensor) for part in stage.tensors if part.leaf is None
    }
    (target,) = (node.target for node in stage.graph.nodes if isinstance(node.target, FusedNeuron))
    return target, StageModule(held, {path: info.module for path, info in stage.leaves.items()})


def arguments(target: FusedNeuron, module: StageModule) -> list[Any]:
    """Values of the region's placeholders: the module's tensors, training, the batch size, and random numbers."""
    tensors = {name.replace(".", "_"): value for name, value in module.state_dict(keep_vars=True).items()}
    dtype = next(value.dtype for value in module.parameters())
    found: list[Any] = []
    for node in target.region.nodes:
        value = facts.get(node, Value)
        if node.op == "placeholder" and value is None:
            found.append(True if node.target == "training" else 2)
        elif node.op == "placeholder":
            assert value is not None
            own = torch.rand(value.shape, dtype=dtype).mul_(2).requires_grad_()
            found.append(tensors.get(str(node.target), own))
    return found


def test_a_measured_neuron_leaves_no_trace_of_being_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers, parameters and state are as before; a second call measures nothing."""
    torch.manual_seed(0)
    x = torch.rand(4, 2, 5, 4, 4)
    target, module = fused(Block(lif(), residual=False), x, fuse="auto")
    args, timer = arguments(target, module), Timer(3.0, 2.0, 1.0)
    region = Region(target, module)
    monkeypatch.setattr(region, "_compiled", region._run)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ways = {"kernel": region.plain, "compiled": region.compiled, "plain": region.plain}
    choices = Choices(tmp_path / "ways.json", timer)
    assert fastest(choices, "kind", ways, args, region) == "plain"
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert fastest(choices, "kind", ways, args, region) == "plain" and timer.calls == 3


def test_a_fused_neuron_asks_once_for_each_kind_of_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself, which needs a GPU, is replaced by the region."""
    torch.manual_seed(0)
    x = torch.rand(4, 2, 5, 4, 4)
    target, module = fused(Block(lif(), residual=False), x, fuse="auto")
    bound = Fused(target, module, target.over(module.bind))
    bound.choices = Choices(tmp_path / "ways.json", Timer(*[3.0, 1.0, 2.0] * 3))
    monkeypatch.setattr(bound, "_ways", dict.fromkeys(NOTHING, bound._region.plain))
    monkeypatch.setattr(fused_neuron.triton.knobs.runtime, "interpret", True)
    args = arguments(target, module)
    for _ in range(2):
        bound._region.reset()
        made = bound(*args)
    with torch.no_grad():
        bound._region.reset()
        bound(*args)
    assert 0.01 < float(made.mean()) < 0.99
    assert set(bound._taken.values()) == {"compiled"} and len(bound._taken) == 2


def test_kinds_tell_apart_what_is_not_equally_fast() -> None:
    x = torch.rand(100, requires_grad=True)
    kinds = {
        kind_of(["a"], x, True),
        kind_of(["b"], x, True),
        kind_of(["a"], x, False),
        kind_of(["a"], x.half(), True),
        kind_of(["a"], torch.rand(200, requires_grad=True), True),
        kind_of(["a"], x.detach(), True),
    }
    assert len(kinds) == 6
    assert kind_of(["a"], torch.rand(128, requires_grad=True), True) in kinds


def psn() -> nn.Module:
    """A neuron that multiplies by a matrix over time, and fires."""
    made = neuron.PSN(T=4)
    nn.init.uniform_(made.weight, 0.0, 0.5)
    nn.init.constant_(made.bias, -0.9)
    return Block(made, residual=False)


@pytest.mark.parametrize(
    "make", [pytest.param(lambda: Steps(Mixing()), marks=pytest.mark.all, id="inhibition"), pytest.param(psn, id="PSN")]
)
def test_a_compiled_region_is_the_region(make: Callable[[], nn.Module]) -> None:
    """Output and gradients, in float64; and of half-precision values computed in float32."""
    torch.manual_seed(0)
    x = torch.rand(4, 2, 5, 4, 4, dtype=torch.float64) * 2
    target, module = fused(make().double(), x, fuse=True)
    assert target.way == "compiled"
    runs = []
    for way in ("plain", "compiled"):
        torch.manual_seed(1)
        region, args = Region(target, module), arguments(target, module)
        y = getattr(region, way)(*args)
        learned = [value for value in args if isinstance(value, Tensor) and value.requires_grad]
        runs.append((y, *torch.autograd.grad((y * torch.arange(y.numel()).view_as(y).cos()).sum(), learned)))
    assert 0.01 < float(runs[0][0].mean()) < 0.99
    assert all(float(grad.abs().max()) > 0 for grad in runs[0][1:])
    for wanted, found in zip(*runs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_the_host_takes_does_not_count() -> None:
    x, stream = torch.zeros(8, device="cuda"), torch.cuda.current_stream()
    assert cuda_seconds(lambda: (time.sleep(2e-3), x.add_(1))) < 1e-3
    assert cuda_seconds(lambda: (time.sleep(2e-3), x.sum().item())) > 2e-3
    assert float(x[0]) > 3
    assert torch.cuda.current_stream() == stream
    assert torch.rand(3, device="cuda").shape == (3,)
