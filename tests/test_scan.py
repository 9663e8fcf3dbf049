"""Loops whose steps run in the open: the neuron layers' own numbers, with what does not change computed once."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from snnpart.frameworks import adapter_for
from snnpart.graph import Body
from snnpart.ops_time import Loop
from snnpart.scan import Opened, Scan
from tests.passes.rewrite.fold_time import nets
from tests.passes.rewrite.fold_time.parity import active, fold, images, traced

_NAMES = (
    "view _unsafe_view unbind select slice expand t transpose permute detach unsqueeze squeeze alias as_strided split "
    "split_with_sizes _reshape_alias"
)
_VIEWS = frozenset(_NAMES.split())


class Kernels(TorchDispatchMode):
    """Counts the operations that would be kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _VIEWS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def _kernels(step: Callable[[], Any]) -> Counter[str]:
    with Kernels() as found:
        step()
    return found.names


def _sum(outputs: Any) -> Tensor:
    found = (outputs,) if isinstance(outputs, Tensor) else outputs
    return torch.stack([one.square().mean() for one in found]).sum()


def _loop_step(module: nn.Module, x: Tensor) -> Callable[[], Any]:
    def step() -> None:
        module.zero_grad(set_to_none=True)
        _sum(module(x)).backward()

    return step


def _folded_step(module: nn.Module, x: Tensor) -> Callable[[], Any]:
    graph = fold(traced(module, (x,)))
    tensors = {name: (info.kind, info.tensor) for name, info in graph.tensors.items() if info.leaf is None}
    body = Body(tensors, {path: copy.deepcopy(leaf.module) for path, leaf in graph.leaves.items()})
    run = body.bind(graph.graph)

    def step() -> None:
        body.zero_grad(set_to_none=True)
        for layer in body.modules():
            adapter_for(layer).reset(layer)
        _sum(run(x)).backward()

    return step


def _scans(module: nn.Module, x: Tensor, **dims: Any) -> list[Opened | None]:
    """What became of each loop of the folded network, after one run."""
    graph = fold(traced(module, (x,), **dims))
    body = Body(
        {name: (info.kind, info.tensor) for name, info in graph.tensors.items() if info.leaf is None},
        {path: copy.deepcopy(leaf.module) for path, leaf in graph.leaves.items()},
    )
    scans: list[Scan] = []

    def bound(target: Any) -> Any:
        made = body.bound(target)
        if isinstance(made, Scan):
            scans.append(made)
        return made

    body.bind(graph.graph, bound)(x)
    return [one for scan in scans for one in scan._opened.values()]


def test_the_snntorch_net_launches_less_than_half_the_kernels() -> None:
    pytest.importorskip("snntorch")
    torch.manual_seed(0)
    module, x = active(nets.ConvLoop(25), torch.float32), images(2, 1, 10, 10, dtype=torch.float32)
    own, folded = _loop_step(module, x), _folded_step(module, x)
    folded()
    before, after = _kernels(own), _kernels(folded)
    assert sum(after.values()) * 2 < sum(before.values())
    layers = len([m for m in module.modules() if type(m).__name__ == "Leaky"])
    assert before["clamp"] == 25 * layers
    assert after["clamp"] <= 2 * layers  # once, and once in backward where beta is learned


@pytest.mark.parametrize(
    ("needs", "make", "shape", "dims"),
    [
        ("snntorch", lambda: nets.ConvLoop(5), (2, 1, 10, 10), {}),
        ("snntorch", lambda: nets.RLeakyLoop(5), (3, 5, 6), {"in_dims": 0, "time_dims": 1}),
        ("norse", lambda: nets.NorseLoop(5), (2, 1, 6, 6), {}),
        ("torch", lambda: nets.Residual(5), (2, 2, 5, 5), {}),
    ],
)
def test_the_steps_of_every_neuron_run_in_the_open(
    needs: str, make: Callable[[], nn.Module], shape: tuple[int, ...], dims: dict[str, Any]
) -> None:
    pytest.importorskip(needs)
    torch.manual_seed(0)
    module = active(make(), torch.float32)
    opened = _scans(module, images(*shape, dtype=torch.float32), **dims)
    assert opened and all(isinstance(one, Opened) for one in opened)


def test_a_layer_with_a_hook_or_with_hidden_state_stays_closed() -> None:
    snn = pytest.importorskip("snntorch")
    torch.manual_seed(0)
    module, x = active(nets.ConvLoop(3), torch.float32), images(2, 1, 10, 10, dtype=torch.float32)
    seen: list[Any] = []
    for layer in module.modules():
        if isinstance(layer, snn.Leaky):
            layer.register_forward_hook(lambda *args: seen.append(args[2]))
    assert _scans(module, x) == []
    assert len(seen) >= 3


class _Late(nn.Module):
    """A membrane with reset to zero whose spike is read at the next step: the first step differs in what it carries."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.fc, self.decay = steps, nn.Linear(4, 4), nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        v, out = torch.zeros_like(x), []
        for _ in range(self.steps):
            v = self.decay.clamp(0, 1) * v * (v < 1).to(v.dtype) + self.fc(x)
            out.append(torch.sigmoid(4 * (v - 1)))
        return torch.stack(out)


def test_what_nothing_carried_needs_runs_once_for_all_steps() -> None:
    torch.manual_seed(0)
    module, x = _Late(6).double(), images(3, 4)
    own, folded = _kernels(_loop_step(module, x)), _folded_step(module, x)
    folded()
    found = _kernels(folded)
    assert own["sigmoid"] == 6 and found["sigmoid"] == 1
    assert found["clamp"] == 1 and found["addmm"] == 1  # what parameters alone make is made once for all steps


def test_spikes_that_reset_at_the_next_step_are_made_for_all_steps_at_once() -> None:
    pytest.importorskip("snntorch")
    torch.manual_seed(0)
    module = active(nets.ConvLoop(5), torch.float32)
    for one in _scans(module, images(2, 1, 10, 10, dtype=torch.float32)):
        assert isinstance(one, Opened) and one._late
        assert len(one._kept) == 1  # the membrane: no more is stacked than the loop had results


def test_shapes_and_modes_are_opened_apart() -> None:
    torch.manual_seed(0)
    module = _Late(4).double()
    graph = fold(traced(module, (images(3, 4),)))
    loops = [node.target for node in graph.graph.nodes if isinstance(node.target, Loop)]
    assert len(loops) == 1
    body = Body({name: (info.kind, info.tensor) for name, info in graph.tensors.items()}, {})
    run = body.bind(graph.graph)
    for rows in (3, 5):
        x = images(rows, 4)
        assert torch.allclose(run(x)[0], module(x), atol=1e-12)
        with torch.no_grad():
            assert torch.allclose(run(x)[0], module(x), atol=1e-12)
