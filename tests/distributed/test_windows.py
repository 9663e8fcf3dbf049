"""Windows of time: state goes from one to the next without its graph, and equals a plain loop that detaches it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart.api import load, parallelize
from snnpart.errors import ConfigError
from snnpart.frameworks import reset_state
from tests.distributed.cases import LIF, det
from tests.distributed.jobs_windows import NETS, SAMPLES, STEPS, masks, rate_loss, sequences
from tests.distributed.pool import Pool
from tests.distributed.reference import assert_same

JOBS = "tests.distributed.jobs_windows:"
NEEDS = {"layers": "spikingjelly", "hidden": "snntorch"}


def need(net: str) -> None:
    if net in NEEDS and importlib.util.find_spec(NEEDS[net]) is None:
        pytest.skip(f"needs {NEEDS[net]}")


def state_of(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Where a neuron keeps its membrane, and under which name."""
    if isinstance(module, LIF):
        return vars(module), "v"
    if "_memories" in vars(module):
        return vars(module)["_memories"], "v"
    return (module._buffers, "mem") if "mem" in module._buffers else None  # type: ignore[return-value]


def detach(model: nn.Module) -> None:
    for held, name in filter(None, map(state_of, model.modules())):
        if isinstance(held[name], Tensor):
            held[name] = held[name].detach()


def restart(model: nn.Module, mask: Tensor) -> None:
    """The samples of the mask start anew: zero, for SpikingJelly's neurons here their reset value 0.05."""
    for module in model.modules():
        found = state_of(module)
        if found is not None and isinstance(found[0][found[1]], Tensor):
            held, name = found
            held[name] = torch.where(
                mask[:, None], torch.full_like(held[name], getattr(module, "v_reset", 0.0)), held[name]
            )


def firing(model: nn.Module) -> dict[str, list[float]]:
    """The rates of every neuron layer, as they come."""
    rates: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        if state_of(module) is not None:
            own = rates.setdefault(name, [])
            module.register_forward_hook(lambda _, __, out, own=own: own.append(float(out.detach().mean())))  # type: ignore[misc]
    return rates


def reference(net: str, *, every: int | None, carry: bool, masked: bool = False, parts: int = 1) -> dict[str, Any]:
    """The same steps as a plain loop: microbatches are independent sequences, so their gradients add up."""
    model = NETS[net]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reset_state(model)
    rates = firing(model)
    losses = []
    for (x, y), mask in zip(sequences(), masks(), strict=True):
        optimizer.zero_grad()
        if not carry:
            reset_state(model)
        elif masked and mask is not None:
            restart(model, mask)
        total = 0.0
        for window in x.split(every or STEPS):
            detach(model)
            out = torch.stack([model(step) for step in window])
            loss = rate_loss(out, y) * (len(window) / STEPS)
            loss.backward()
            total += loss.item()
        losses.append(total)
        assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
        optimizer.step()
    assert rates and all(0.01 < sum(own) / len(own) < 0.99 for own in rates.values()), rates
    if not carry:
        reset_state(model)
    with torch.no_grad():
        outputs = torch.stack([model(step) for step in sequences()[0][0]])
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "state": parameters, "outputs": outputs}


def assert_equal(result: dict[str, Any], want: dict[str, Any]) -> None:
    assert result["losses"] == pytest.approx(want["losses"], abs=1e-9)
    assert_same({name: result["state"][name] for name in want["state"]}, want["state"])
    torch.testing.assert_close(result["outputs"], want["outputs"], rtol=0, atol=1e-9)


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "microbatches": 3},
    "parts": {"microbatches": 2},
    "grid": {"tp": 2, "pp": 2, "microbatches": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved-1f1b", "microbatches": 4},
    "zbv": {"pp": 2, "schedule": "zbv", "microbatches": 4},
}


@pytest.mark.parametrize("how", ["dp", "tp", "pp", "parts"])
@pytest.mark.parametrize("net", ["plain", "layers", "hidden"])
def test_truncated_windows(pool: Pool, net: str, how: str) -> None:
    """T = 7 in windows of 3: two full ones and a short one."""
    need(net)
    want = reference(net, every=3, carry=False)
    assert want["losses"] != pytest.approx(reference(net, every=None, carry=False)["losses"], abs=1e-6)
    ranks = 1 if how == "parts" else 2
    for result in pool.run(JOBS + "train", ranks=ranks, net=net, detach_every=3, **TOPOLOGIES[how]):
        assert_equal(result, want)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(
    ("net", "how"),
    [
        ("plain", "dp"), ("plain", "tp"), ("plain", "pp"), ("plain", "grid"),
        pytest.param("deep", "interleaved", marks=pytest.mark.all), ("deep", "zbv"),
        ("layers", "pp"), ("layers", "dp"), ("hidden", "tp"),
    ],
)  # fmt: skip
def test_state_kept_between_steps(pool: Pool, net: str, how: str, masked: bool) -> None:
    need(net)
    want = reference(net, every=None, carry=True, masked=masked)
    other = reference(net, every=None, carry=True, masked=not masked)
    assert want["losses"] != pytest.approx(other["losses"], abs=1e-6), "the masks must matter"
    ranks = 4 if how == "grid" else 2
    for result in pool.run(JOBS + "train", ranks=ranks, net=net, masked=masked, state="carry", **TOPOLOGIES[how]):
        assert_equal(result, want)


@pytest.mark.parametrize("how", ["dp", "tp", "pp", "grid"])
@pytest.mark.parametrize("together", [True, 2], ids=["at-once", "rounds"])
def test_windows_whose_state_is_kept(pool: Pool, how: str, together: bool | int) -> None:
    """Windows of 3, 3 and 1 steps: in rounds of 2 the first round takes one step, and the last window has no rounds."""
    want = reference("plain", every=3, carry=True, masked=True)
    options = {"masked": True, "state": "carry", "detach_every": 3, "fold": together, **TOPOLOGIES[how]}
    for result in pool.run(JOBS + "train", ranks=4 if how == "grid" else 2, net="plain", **options):
        assert_equal(result, want)
        assert result["fold"] == (0 if together is True else 2)


def test_windows_of_a_multi_step_network(pool: Pool) -> None:
    need("layers")
    for result in pool.run(JOBS + "train", ranks=2, net="layers", mode="m", detach_every=3, pp=2, microbatches=2):
        assert_equal(result, reference("layers", every=3, carry=False))


def test_what_does_not_fit_is_refused_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(JOBS + "errors", ranks=2)
    assert first == second
    assert "the reset mask is bool[2], the state is of 3 samples" in first["mask"] and "rank 1" in first["mask"]
    assert "the reset mask is bool[2], the state is of 3 samples" in first["reset"]
    assert "the state of 3 samples (microbatches [3]) does not fit a batch of 2" in first["batch"]
    assert "reset_mask= needs a program whose state is carried" in first["no carry"]
    assert "the ranks' sequences have [3, 5] windows" in first["lengths"]


@pytest.mark.parametrize("how", ["dp", "pp", "grid"])
def test_state_that_another_stage_reads(pool: Pool, how: str) -> None:
    """Within one step nothing goes back, so that the network can be cut; from step to step it does."""
    want = reference("feedback", every=1, carry=True, masked=True)
    cut = {"split_at": ["fc"]} if "pp" in TOPOLOGIES[how] else {}
    options = {"masked": True, "state": "carry", "detach_every": 1, **cut, **TOPOLOGIES[how]}
    for result in pool.run(JOBS + "train", ranks=4 if how == "grid" else 2, net="feedback", **options):
        assert_equal(result, want)
        assert result["moved"] == ({1} if cut else set())


def test_hand_written_state_of_a_saved_program_is_refused(tmp_path: Path) -> None:
    (x, _), *_ = sequences()
    program = parallelize(NETS["plain"](), example_inputs=x, input_layout="TNF", time_steps=STEPS, state="carry")
    program.save(tmp_path / "p")
    with pytest.raises(ConfigError, match=r"the state \['1.v', '3.v'\] of hand-written neurons cannot be carried"):
        load(tmp_path / "p").launch(carry=True)


class Local(nn.Module):
    """Its membrane is a local variable: it starts anew at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lif = nn.Linear(4, 3), LIF(vth=0.2)

    def forward(self, x: Tensor) -> Tensor:
        v, out = torch.zeros(x.shape[1], 3, dtype=x.dtype), []
        for step in x:
            v = 0.9 * v + self.fc(step)
            out.append(v)
        return torch.stack(out)


def test_state_in_local_variables_is_refused() -> None:
    torch.manual_seed(0)
    model, x = Local().double(), det(6, 2, 4)
    with pytest.raises(ConfigError, match="output 0 of the whole sequence is not made of those of windows of 3 steps"):
        parallelize(model, example_inputs=x, input_layout="TNF", detach_every=3)
    program = parallelize(model, example_inputs=x, input_layout="TNF", state="carry")
    with pytest.raises(ConfigError, match="no module keeps state between calls"):
        program.launch()


def test_windows_that_cannot_be_cut() -> None:
    model, x = NETS["plain"](), det(SAMPLES, 4)
    with pytest.raises(ConfigError, match="detach_every=3 does not divide time_steps=7"):
        parallelize(model, example_inputs=x, time_steps=7, detach_every=3)
    with pytest.raises(ConfigError, match="no input has a time dim"):
        parallelize(model, example_inputs=x, detach_every=3)
    with pytest.raises(ConfigError, match="state='keep' is not known"):
        parallelize(model, example_inputs=x, state="keep")
    with pytest.raises(ConfigError, match="detach_every=0 is not a positive integer"):
        parallelize(model, example_inputs=x, time_steps=6, detach_every=0)


def test_a_plan_for_far_fewer_sequences_is_said_to_be_one(pool: Pool) -> None:
    for found in pool.run("tests.distributed.jobs_windows:far_more_samples", ranks=2):
        assert found[:2] == [[], []] and found[2] == found[3]
        (notice,) = found[2]
        assert f"made for {SAMPLES} samples at a time, and {9 * SAMPLES} come" in notice


def test_one_image_in_windows() -> None:
    """A static input is given to every window; evaluation puts the windows together."""
    model, x, y = NETS["plain"](), det(SAMPLES, 4) * 2, torch.arange(SAMPLES) % 3
    with parallelize(model, example_inputs=x, time_steps=6, detach_every=3).launch() as running:
        loss = running.train_step(x, y, rate_loss).item()
        outputs, gradients = running.eval_step(x), running.gradients()
    total = 0.0
    for _ in range(2):
        detach(model)
        part = rate_loss(torch.stack([model(x) for _ in range(3)]), y) / 2
        part.backward()
        total += part.item()
    assert loss == pytest.approx(total, abs=1e-9)
    assert_same(gradients, {name: p.grad for name, p in model.named_parameters()})  # type: ignore[misc]
    reset_state(model)
    with torch.no_grad():
        torch.testing.assert_close(outputs, torch.stack([model(x) for _ in range(6)]), rtol=0, atol=1e-9)


def test_preserved_keeps_the_state() -> None:
    (x, y), *_ = sequences()
    with parallelize(
        NETS["plain"](), example_inputs=x, input_layout="TNF", time_steps=STEPS, state="carry"
    ).launch() as running:
        first = running.eval_step(x)
        with running.preserved():
            torch.testing.assert_close(running.eval_step(x), first)
        second = running.eval_step(x)
        running.reset()
        torch.testing.assert_close(running.eval_step(x), first)
        assert not torch.equal(first, second)
        torch.testing.assert_close(running.eval_step(x), second)
