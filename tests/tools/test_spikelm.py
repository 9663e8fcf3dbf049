"""The spiking language model of the topology table: what it computes, and that snnpart compiles it whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from snnpart import parallelize
from tools.bench.spikelm_model import SMALL, BiSpike, Sizes, SpikeLM
from tools.bench.spikelm_ours import batches_of, loss


def test_it_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = SpikeLM(Sizes())
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1.41e9, rel=0.005)


def test_spikes_are_of_both_signs_and_reset_what_they_fire_from() -> None:
    currents = torch.tensor([[0.6, -2.0, 0.4], [0.0, 0.0, 0.3], [0.0, 0.0, 0.0]], requires_grad=True)
    spikes = BiSpike(3)(currents)
    assert spikes.tolist() == [[1.0, -1.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 0.0]]
    spikes[0].sum().backward()
    assert currents.grad is not None and currents.grad[0].tolist() == [1.0, 0.0, 1.0]  # rounding passes, clamping stops


@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 2}], ids=str)
def test_snnpart_compiles_it_and_compares_it_with_the_module(split: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = SpikeLM(SMALL)
    asked = SimpleNamespace(batch=2, device="cpu")
    tokens, following = batches_of(SMALL, asked, copy=0)[0]  # type: ignore[arg-type]
    spiking: list[float] = []
    for module in model.modules():
        if isinstance(module, BiSpike):
            module.register_forward_hook(lambda _, __, out: spiking.append(out.abs().mean().item()))
    loss(model(tokens), following).backward()
    assert len(spiking) == 4 and all(0.01 < rate < 0.99 for rate in spiking)
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    program = parallelize(SpikeLM(SMALL), example_inputs=tokens, verify="full", **split)  # type: ignore[arg-type]
    owned = program.compiled.plan
    assert owned.tp * owned.pp == 2
