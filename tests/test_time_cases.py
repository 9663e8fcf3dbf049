"""Cases about state and time in one process: leftover state, dropout over time, a batch size written in."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import simulate
from snnpart.api import parallelize
from snnpart.errors import ConfigError
from tests.distributed.cases import det, fill
from tests.neurons import LIF, Spike


def outputs(model: nn.Module, x: Tensor, training: bool = True, microbatches: int = 1, **options: object) -> Tensor:
    program = parallelize(model, example_inputs=x, microbatches=microbatches, **options).compiled  # type: ignore[arg-type]
    return simulate.run(program, (x,), training=training, microbatches=microbatches).outputs[0].detach()


def test_a02_leftover_state_is_not_taken_in() -> None:
    """The first step of a program equals that of a fresh network, also after a run, a copy and a change of dtype."""
    model = fill(nn.Sequential(nn.Linear(4, 6), LIF(), nn.Linear(6, 3)))
    x = det(5, 4)
    with torch.no_grad():
        fresh, stale = model(x).clone(), model(x).clone()
    assert not torch.allclose(fresh, stale)
    torch.testing.assert_close(outputs(model, x), fresh, rtol=0, atol=1e-12)
    moved = copy.deepcopy(model).float()
    assert moved[1].v.dtype == torch.float64
    torch.testing.assert_close(outputs(moved, x.float()), fresh.float(), rtol=0, atol=1e-5)
    with torch.no_grad():
        assert not torch.equal(model(x), fresh), "the user's own state is left as it was"


class Dropped(nn.Module):
    """Case A15: one mask for all steps of a window."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.a, self.n, self.b, self.share = nn.Linear(4, 8), LIF(vth=0.4), nn.Linear(8, 3), share
        self.mask: Tensor | None = None

    def reset(self) -> None:
        self.mask = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.n(self.a(x))
        if self.training:
            if self.mask is None:
                self.mask = F.dropout(torch.ones_like(z), self.share)
            z = z * self.mask
        return self.b(z), self.mask if self.mask is not None else torch.ones_like(z)


@pytest.mark.parametrize("tp", [1, 2])
def test_a15_one_mask_a_window(tp: int) -> None:
    """Constant over T, new for every window, equal on tp ranks where the activation is whole."""
    model, x = fill(Dropped()), det(5, 6, 4)
    program = parallelize(model, example_inputs=x, input_layout="TNF", time_steps=5, tp=tp, verify="trace").compiled
    masks = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        mask = simulate.run(program, (x,), training=True).outputs[1]
        assert all(torch.equal(step, mask[0]) for step in mask)
        assert set(mask.flatten().tolist()) == {0.0, 2.0}
        masks.append(mask[0])
    assert not torch.equal(*masks)


def test_a15_without_dropout_all_topologies_agree() -> None:
    model, x = fill(Dropped(share=0.0)), det(5, 6, 4)
    options = {"input_layout": "TNF", "time_steps": 5}
    torch.testing.assert_close(outputs(model, x, tp=2, **options), outputs(model, x, **options), rtol=0, atol=1e-9)


class Squeeze(nn.Module):
    """Case A20: the batch size is written in, and rows are samples times steps."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def forward(self, x: Tensor) -> Tensor:
        steps = x.reshape(self.batch_size, -1, *x.shape[1:])
        v, out = torch.zeros_like(steps[:, 0]), []
        for t in range(steps.shape[1]):
            v = v + steps[:, t]
            z: Tensor = Spike.apply(v - 1.0)
            v = v - z.detach()
            out.append(z)
        return torch.stack(out, 1).flatten(0, 1)


class Squeezed(nn.Module):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.l, self.s = nn.Linear(3, 4), Squeeze(batch_size)

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        return self.s(self.l(x.flatten(0, 1))).unflatten(0, (n, t)).sum(1)


def test_a20_a_batch_size_written_into_user_code() -> None:
    """The batch is fixed: the whole batch runs, and half of it in microbatches is refused, never computed wrongly."""
    x = det(4, 6, 3) * 3
    model = fill(Squeezed(4))
    torch.testing.assert_close(outputs(model, x), model(x).detach(), rtol=0, atol=1e-12)
    half = model(x[:2])
    assert half.shape == (2, 4) and not torch.equal(half, model(x)[:2])
    with pytest.raises(ConfigError, match="cannot be cut into 2 microbatches: .*'s'"):
        outputs(model, x, microbatches=2)
