"""Networks on the meta device and lazy ones: launched slice by slice, they are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from snnpart.api import parallelize
from snnpart.errors import ConfigError, TraceError
from tests.distributed.cases import LIF, reset
from tests.distributed.jobs_values import Lazy, Net, blank, data, drawn, reference, wide
from tests.distributed.pool import Pool
from tests.distributed.reference import assert_same


def one_step(model: nn.Module, classes: int = 7) -> tuple[float, dict[str, torch.Tensor]]:
    x, y = data()
    rates: list[float] = []
    for module in model.modules():
        if isinstance(module, LIF):
            module.register_forward_hook(lambda m, a, out: rates.append(out.mean().item()))
    loss = F.cross_entropy(model(x), y % classes)
    loss.backward()
    reset(model)
    assert rates and all(0.01 < rate < 0.99 for rate in rates), rates
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def saved(folder: Path) -> None:
    """The reference's state as a file of torch, and as two of safetensors without the tied name."""
    safetensors = pytest.importorskip("safetensors.torch")
    state = reference().state_dict()
    torch.save(state, folder / "state.pt")
    (folder / "parts").mkdir()
    names = [name for name in state if name != "last.weight"]
    for i in range(2):
        safetensors.save_file({n: state[n] for n in names[i::2]}, folder / "parts" / f"{i}.safetensors")


@pytest.mark.parametrize(
    ("source", "ranks", "how"),
    [
        ("reset", 2, {"tp": 2}),
        ("reset", 4, {"tp": 2, "pp": 2}),
        ("reset", 2, {"dp": "fsdp2"}),
        ("mapping", 3, {"tp": 3}),
        ("torch", 2, {"tp": 2}),
        ("safetensors", 2, {"tp": 2}),
        ("function", 2, {"pp": 2}),
    ],
    ids=lambda v: str(v).replace(" ", ""),
)
def test_a_blank_network_starts_as_one_process(
    pool: Pool, tmp_path: Path, source: str, ranks: int, how: dict[str, Any]
) -> None:
    model = reference()
    if source == "function":
        state = {n: drawn(n, tuple(x.shape), x.dtype) for n, x in model.state_dict().items() if n != "last.weight"}
        model.load_state_dict({**state, "last.weight": state["first.weight"]})
    elif source in ("torch", "safetensors"):
        saved(tmp_path)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    loss, gradients = one_step(model)
    arguments = {"source": source, "folder": str(tmp_path), **how}
    for result in pool.run("tests.distributed.jobs_values:start", ranks=ranks, **arguments):
        assert sorted(result["before"]) == sorted(before)
        assert all(torch.equal(result["before"][name], value) for name, value in before.items())
        assert result["loss"] == pytest.approx(loss, abs=1e-9)
        assert_same(result["gradients"], gradients)
        assert_same(result["after"], model.state_dict())
        assert any("nothing was compared" in notice for notice in result["notices"])


@pytest.mark.parametrize("meta", [False, True])
def test_lazy_layers(pool: Pool, meta: bool) -> None:
    """Off the meta device they are drawn as by the user's own first forward, on it as any meta model."""
    torch.manual_seed(3)
    model = Lazy().double()
    model(data()[0])
    model.b.reset_running_stats()
    reset(model)
    if meta:
        torch.manual_seed(3)
        for module in (model.c, model.b, model.h):
            module.reset_parameters()
    want = {name: x.clone() for name, x in model.state_dict().items()}
    loss, gradients = one_step(model, 5)
    for result in pool.run("tests.distributed.jobs_values:lazy", ranks=2, meta=meta):
        assert_same(result["state"], want)
        assert result["loss"] == pytest.approx(loss, abs=1e-9)
        assert_same(result["gradients"], gradients)


@pytest.mark.parametrize("source", ["reset", "torch"])
def test_no_rank_holds_the_whole_network(pool: Pool, tmp_path: Path, source: str) -> None:
    """At most its slices, one layer, and what that is cut from: less than the whole, while it launches too."""
    torch.save(wide().double().state_dict(), tmp_path / "wide.pt")
    layer = 8 * (128 * 128 + 128)
    for found in pool.run("tests.distributed.jobs_values:peak", ranks=2, folder=str(tmp_path), source=source):
        assert found["whole"] == 8 * layer
        assert found["own"] < 0.52 * found["whole"]
        assert found["own"] <= found["peak"] <= found["own"] + 2 * layer < found["whole"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", "ConfigError: rank 0: values lacks ['mix.weight']"),
        ("shape", "ConfigError: rank 0: values has shape (3, 3) for 'mix.weight', which has shape (8, 8)"),
        ("unlike", "LaunchError: rank 1 was given other values of 'mix.bias' than the ranks before it"),
        ("type", "ConfigError: rank 0: values is a int"),
    ],
)
def test_values_that_are_no_good(pool: Pool, kind: str, text: str) -> None:
    for said in pool.run("tests.distributed.jobs_values:refused", ranks=2, kind=kind):
        assert said.startswith(text), said


class Raw(nn.Module):
    """A parameter that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.l = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.l(x * self.scale)
        return out


class Half(Raw):
    """An initialisation that forgets a parameter."""

    def reset_parameters(self) -> None:
        self.l.reset_parameters()


@pytest.mark.parametrize(
    ("kind", "text"), [(Raw, r"\['scale'\] are on the meta device and nothing"), (Half, r"leaves \['scale'\] without")]
)
def test_a_tensor_that_nothing_initialises_is_named(kind: type[nn.Module], text: str) -> None:
    program = parallelize(blank(kind), example_inputs=torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(ConfigError, match=text):
        program.launch()


def test_a_lazy_layer_that_forward_does_not_reach() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.LazyLinear(3), nn.LazyLinear(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.a(x)
            return out

    with pytest.raises(TraceError, match=r"lazy layers \['b'\] have no shape"):
        parallelize(Two(), example_inputs=torch.zeros(2, 4))


def test_a_blank_network_stays_as_it_is() -> None:
    model = blank(Net)
    parallelize(model, example_inputs=data()[0])
    assert all(x.is_meta for x in model.state_dict().values())
