"""One GPU: fused neurons give what the separate operations give, in every dtype, and can be captured."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from snnpart.ops_fused import parts
from snnpart.runtime.kernels.choices import of_this_machine
from snnpart.runtime.kernels.fused_neuron import Fused
from tests.passes.rewrite.test_fuse_neurons import Mixing, lif
from tests.runtime.kernels.fused import Block, Case, Kernels, Steps, both, cases, errors, example, region, silent_in
from tests.runtime.kernels.rounded import CASES as ROUNDED
from tests.runtime.kernels.rounded import Rounded
from tests.runtime.kernels.test_ways import arguments, fused, psn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CASES = cases()


@pytest.fixture(autouse=True)
def exact_matmuls() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_what_the_separate_operations_give(name: str, channels_last: bool) -> None:
    case = CASES[name]
    wanted, found, fused = both(case, example(case, "cuda"), dtype=case.dtype, channels_last=channels_last)
    assert fused == case.fused
    assert silent_in(wanted, case.make()) == []
    limit = 1e-9 if case.dtype is torch.float64 else 1e-5
    assert {key: value for key, value in errors(wanted, found).items() if value > limit} == {}


@pytest.mark.parametrize("name", ["LIF-detached", "PLIF", "long", "eval"])
def test_large_tensors_in_float32(name: str) -> None:
    """Many programs with several tiles each; at most 1e-5 of the spikes flip between two orders of one sum."""
    case = CASES[name]
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.rand((case.steps, 6, 5, 96, 80), generator=generator, device="cuda") * 2
    wanted, found, fused = both(case, x, dtype=torch.float32, channels_last=True)
    assert fused == 1
    flips = (wanted[0] - found[0]).abs() > 0.5
    assert float(flips.double().mean()) <= 1e-5
    off = {
        key: value
        for key, value in errors(wanted, found).items()
        if value > 2e-3 and key not in ("output", "gradient x")
    }
    assert off == {}


@pytest.mark.parametrize("name", ["plain, no norm", "Leaky"])
def test_membranes_are_float32_whatever_the_input_is(name: str) -> None:
    case = CASES[name]
    kernel, reference = region(case, "cuda")
    x = (torch.rand((case.steps, 2, 5, 4, 3), device="cuda") * 2).to(torch.bfloat16)
    spikes = kernel(x)
    assert spikes.dtype is torch.bfloat16
    assert 0.01 < float(spikes.float().mean()) < 0.99
    assert torch.equal(spikes.float(), reference(x.float()))


def test_backward_keeps_x_alone() -> None:
    """In bfloat16 two bytes an element, and a few numbers a channel; neither the residual nor the result."""
    target, module = fused(Block(lif()), torch.rand(4, 8, 5, 32, 32), fuse=True)
    module.cuda()
    found, order = parts(target.region), [node for node in target.region.nodes if node.op == "placeholder"]
    args = arguments(target, module)
    for node in (found.x, found.residual):
        assert node is not None
        place = order.index(node)
        args[place] = args[place].detach().to("cuda", torch.bfloat16).requires_grad_().clone()
    residual, bytes_of_x = order.index(found.residual), args[order.index(found.x)].nbytes  # type: ignore[arg-type]
    gone, kept = weakref.ref(args[residual]), list[int]()
    with saved_tensors_hooks(lambda saved: kept.append(saved.nbytes) or saved, lambda saved: saved):
        made = Fused(target, module, target.over(module.bind))(*args)
    del args[residual]
    assert made.requires_grad and gone() is None
    assert bytes_of_x <= sum(kept) <= bytes_of_x + 1024


def test_a_fused_step_is_captured_and_replayed() -> None:
    """Forward and backward in one CUDA graph; a replay on new input gives what eager gives on it."""
    case = CASES["PLIF"]
    wanted, found, _ = both(case, example(case, "cuda"), dtype=torch.float32, captured=True)
    assert {key: value for key, value in errors(wanted, found).items() if value > 1e-5} == {}


@pytest.mark.parametrize("state", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ROUNDED)
def test_states_are_rounded_as_the_text_in_plain_torch_rounds_them(name: str, state: str) -> None:
    case = CASES[name]
    wanted, found, _ = both(case, example(case, "cuda"), dtype=case.dtype, kinds=(Rounded, Kernels), neuron_dtype=state)
    limit = 1e-9 if case.dtype is torch.float64 else 1e-5
    assert {key: value for key, value in errors(wanted, found).items() if value > limit} == {}


@pytest.mark.parametrize("case", [Case(lambda: Steps(Mixing())), Case(psn)], ids=["inhibition", "PSN"])
def test_steps_without_kernel_text_are_compiled(case: Case) -> None:
    wanted, found, fused = both(case, example(case, "cuda"), dtype=case.dtype)
    assert fused == 1
    assert 0.01 < float(wanted[0].mean()) < 0.99
    assert {key: value for key, value in errors(wanted, found).items() if value > 1e-9} == {}


@pytest.mark.parametrize("name", ["LIF-detached", "written", "each step's statistics"])
def test_the_fastest_way_is_measured_and_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three ways run, nothing is left of the measurement, and the result is that of the separate operations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    of_this_machine.cache_clear()
    case = CASES[name]
    wanted, found, _ = both(case, example(case, "cuda"), dtype=case.dtype, fuse="auto")
    of_this_machine.cache_clear()
    assert {key: value for key, value in errors(wanted, found).items() if value > 1e-9} == {}
    (file,) = tmp_path.glob("snnpart/captured-ways-*.json")
    ((_, choice),) = json.loads(file.read_text()).items()
    assert set(choice["microseconds"]) == {"kernel", "compiled", "plain"}
    assert choice["way"] == min(choice["microseconds"], key=choice["microseconds"].get)
