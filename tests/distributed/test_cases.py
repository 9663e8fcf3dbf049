"""Cases of the field on real process groups: every topology equals one process in float64.

The numbers of one process are computed here and, where the case states them, compared with those too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from snnpart import schedules
from snnpart.errors import PlanError
from snnpart.plan import Plan
from tests.distributed.cases import CASES, LIF, Case, Plif, reset
from tests.distributed.compiled import compile_case
from tests.distributed.pool import Pool
from tests.distributed.reference import OneProcess, assert_same

DDP2, FSDP2, TP2, PP2 = {"dp": "ddp"}, {"dp": "fsdp2"}, {"tp": 2}, {"pp": 2}
TP_PP = {"tp": 2, "pp": 2}


def one_process(
    name: str, *, dp: int = 1, microbatches: int = 1, learn: bool = False, clip: float | None = None
) -> tuple[OneProcess, dict[str, Any]]:
    """The case's steps in one process: losses, outputs, gradients and state."""
    case: Case = CASES[name]
    one = OneProcess(
        case.model(),
        microbatches=microbatches,
        optimizer=(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)) if learn else None,
        reset=reset,
        batch_dim=case.batch_dim,
        target_dim=case.target_dim,
        call=case.call,
        clip=clip,
    )
    losses, outputs = [], []
    assert_active(one.model, lambda: case.call(one.model, case.batches()[0][0]))
    for x, y in case.batches():
        parts = zip(x.tensor_split(dp, case.batch_dim), y.tensor_split(dp, case.target_dim), strict=True)
        losses.append(one.train_step(list(parts), case.loss_fn(x.shape[case.batch_dim])))
        outputs.append([one.evaluate(part) for part in x.tensor_split(dp, case.batch_dim)])
    result = {"losses": losses, "outputs": outputs, "gradients": one.gradients(), "state": one.model.state_dict()}
    return one, result


def assert_active(model: nn.Module, call: Any) -> None:
    """Every neuron layer fires at a rate in 0.01..0.99: parity of silent layers would prove nothing."""
    rates: dict[str, list[float]] = {}
    hooks = [
        module.register_forward_hook(lambda m, args, out, p=path: rates.setdefault(p, []).append(out.mean().item()))
        for path, module in model.named_modules()
        if isinstance(module, LIF | Plif)
    ]
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    call()
    reset(model)
    model.load_state_dict(statistics, strict=False)
    for hook in hooks:
        hook.remove()
    assert all(0.01 < sum(found) / len(found) < 0.99 for found in rates.values()), rates


def check(
    pool: Pool, name: str, ranks: int, how: dict[str, Any], *, learn: bool = False, clip: float | None = None
) -> list[dict[str, Any]]:
    """Run the case on the ranks and compare everything with one process; the ranks' results."""
    per_pipeline = how.get("tp", 1) * how.get("pp", 1)
    how = {"microbatches": 1, **how}
    _, wanted = one_process(name, dp=ranks // per_pipeline, microbatches=how["microbatches"], learn=learn, clip=clip)
    results = pool.run("tests.distributed.jobs:run_case", ranks=ranks, name=name, learn=learn, clip=clip, **how)
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(wanted["losses"], abs=1e-9)
        assert result["losses"] == results[0]["losses"]
        assert_same(result["gradients"], wanted["gradients"])
        assert_same(result["state"], wanted["state"])
        for made, parts in zip(result["outputs"], wanted["outputs"], strict=True):
            torch.testing.assert_close(made, parts[rank // per_pipeline], rtol=0, atol=1e-9)
    return results


def norms(result: dict[str, Any]) -> dict[str, float]:
    return {name: grad.norm().item() for name, grad in result["gradients"].items()}


def name_of(value: Any) -> str:
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("ranks", "how"), [(2, DDP2), (4, DDP2), (2, FSDP2), (2, TP2), (2, PP2)], ids=name_of)
def test_a01_state_is_of_the_local_batch(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    """Each data-parallel rank keeps its own state over the T calls."""
    results = check(pool, "A01", ranks, how)
    dp = ranks // (how.get("tp", 1) * how.get("pp", 1))
    counts = torch.cat([results[r * (ranks // dp)]["outputs"][0].sum((0, 2)) for r in range(dp)])
    assert counts.tolist() == [5, 5, 5, 5, 5, 5, 6, 6]
    wanted = {"0.weight": 1.372229064, "0.bias": 3.056154527, "2.weight": 2.912941334, "2.bias": 1.332793016}
    assert norms(results[0]) == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, DDP2), (2, FSDP2), (2, TP2), (2, {**PP2, "microbatches": 2}), (4, {**TP_PP, "microbatches": 3})],
    ids=name_of,
)
def test_a04_gradients_accumulate_and_state_is_reset(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    """Three steps without an optimizer: gradients add up, nothing of an earlier step is touched again."""
    wanted = {"0.weight": 0.965223848, "0.bias": 2.388490449, "2.weight": 16.736286863, "2.bias": 12.670973027}
    assert norms(check(pool, "A04", ranks, how)[0]) == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, DDP2),
        (2, {**PP2, "microbatches": 2}),
        (2, TP2),
        (4, {**TP_PP, "microbatches": 3}),
    ],
    ids=name_of,
)
def test_a05_last_batch_smaller(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    """Batches of 5, 5, 3 and 5 without building anything again."""
    check(pool, "A05", ranks, how)


def check_refused(microbatches: int, schedule: str) -> None:
    with pytest.raises(PlanError, match=f"schedule='{schedule}' over pp=2 ranks"):
        compile_case(CASES["A09"], pp=2, microbatches=microbatches, schedule=schedule)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a09_no_membrane_leaks_between_microbatches(pool: Pool, microbatches: int, schedule: str) -> None:
    if not schedules.takes(schedule, 2, microbatches):
        return check_refused(microbatches, schedule)
    result = check(pool, "A09", 2, {**PP2, "microbatches": microbatches, "schedule": schedule})[0]
    found = norms(result)
    assert [found["0.l.weight"], found["1.l.weight"]] == pytest.approx([0.050398362, 0.463379377], abs=1e-7)
    assert result["outputs"][0].sum().item() == 8.0


@pytest.mark.parametrize(("ranks", "how"), [(2, TP2), (4, TP2), (4, TP_PP)], ids=name_of)
def test_a10_gradients_of_a_column_split_input_are_summed(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    results = check(pool, "A10", ranks, how, learn=True)
    for result in check(pool, "A10", ranks, how):
        assert norms(result)["0.weight"] == pytest.approx(33.346415819888215, abs=1e-7)
    for name, value in results[0]["replicated"].items():
        assert torch.equal(value, results[1]["replicated"][name])


def test_a11_every_rank_makes_the_same_plan(pool: Pool) -> None:
    """Each rank compiles for itself; the plan is equal, each parameter is on one stage."""
    results = check(pool, "A14", 4, TP_PP)
    assert len({Plan.from_json(result["plan"]).fingerprint for result in results}) == 1
    first, second = set(results[0]["owned"]), set(results[2]["owned"])
    assert not first & second
    assert first | second == {name for name, _ in CASES["A14"].model().named_parameters()}


@pytest.mark.parametrize(("ranks", "how"), [(pp, {"pp": pp, "microbatches": 2}) for pp in (2, 3, 4)], ids=name_of)
def test_a14_skips_pass_through_stages(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    wanted = [0.495394406, 1.780629916, 0.312586434, 2.387209396, 2.58265524]
    found = norms(check(pool, "A14", ranks, {**how, "schedule": "gpipe"})[0])
    assert [found[f"{name}.weight"] for name in "abcdh"] == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("name", ["A26", "A26 N=T"])
@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, DDP2), (1, {"microbatches": 3}), (2, TP2)],
    ids=name_of,
)
def test_a26_batch_is_not_dim_0_of_the_output(pool: Pool, name: str, ranks: int, how: dict[str, Any]) -> None:
    """[N, T, C] in, [T, N, C] out, also when N == T."""
    result = check(pool, name, ranks, how)[0]
    if name == "A26":
        assert norms(result) == pytest.approx({"l.weight": 0.039905327, "l.bias": 0.023317754}, abs=1e-7)
        assert result["losses"] == pytest.approx([1.564432588403968], abs=1e-7)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, DDP2), (2, FSDP2), (2, TP2), (2, PP2), (4, {**PP2, "dp": "ddp"}), (4, {**PP2, "dp": "fsdp2"})],
    ids=name_of,
)
def test_a28_unused_parameters(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    """They hold no one up, keep their values and stay in the state."""
    results = check(pool, "A28", ranks, how, learn=True)
    state, start = results[-1]["state"], CASES["A28"].model().state_dict()
    assert len(state) == 10
    for name in ("0.norm.weight", "0.norm.bias", "1.norm.weight", "1.norm.bias"):
        assert torch.equal(state[name], start[name])
        assert name not in results[0]["gradients"]


@pytest.mark.parametrize(
    ("ranks", "how"), [(2, PP2), (4, {**PP2, "dp": "ddp"}), (4, {**PP2, "dp": "fsdp2"})], ids=name_of
)
def test_a_stage_with_nothing_to_learn(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    results = check(pool, "still", ranks, {**how, "microbatches": 2}, learn=True)
    assert results[-1]["owned"] == ["h.weight", "h.bias"]
    assert set(results[-1]["gradients"]) == {"l.weight", "l.bias"}


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a12_thresholds_of_channels_learn(pool: Pool, tp: int) -> None:
    """Odd widths, a threshold for each channel, one time constant for all; two steps of an optimizer."""
    check(pool, "A12", tp, {"tp": tp}, learn=True)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_depthwise_and_grouped_networks_learn(pool: Pool, tp: int) -> None:
    check(pool, "mobile", tp, {"tp": tp}, learn=True, clip=0.5)


def test_a23_a_gradient_that_is_not_finite_stops_every_rank(pool: Pool) -> None:
    """The last channel's surrogate overflows, on the rank that holds it: all ranks say so, and none takes the step."""
    model, (x, y) = CASES["A23"].model(), CASES["A23"].batches()[0]
    F.cross_entropy(model(x), y).backward()
    assert torch.isnan(model.l.weight.grad).any(1).tolist() == [False, False, False, True], "the user's own function"
    for result in pool.run("tests.distributed.jobs:run_overflow", ranks=2):
        wanted = "LaunchError: the gradients of 'l.bias' (stage 0), 'l.weight' (stage 0) hold NaN or Inf"
        assert result["error"].startswith(wanted), result["error"]
        assert_same(result["state"], dict(CASES["A23"].model().state_dict()), 0.0)


@pytest.mark.parametrize(
    ("ranks", "how"), [(3, {"tp": 3}), (4, {"tp": 4}), (4, {**TP2, "dp": "fsdp2"}), (4, TP_PP)], ids=name_of
)
def test_fewer_channels_than_ranks(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    """Some ranks have nothing to do in some layers; two steps of an optimizer."""
    check(pool, "narrow", ranks, how, learn=True, clip=0.5)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, {**TP2, "shard": {"emb": "row"}}),
        (3, {"tp": 3, "shard": {"emb": "row"}}),
        (4, {"tp": 4, "shard": {"emb": "column"}}),
    ],
    ids=name_of,
)
def test_a25_tied_vocabulary(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    """One matrix at both ends, dealt out by tokens or by features, and its norm counted once by clipping."""
    check(pool, "tied", ranks, how, learn=True, clip=0.5)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, DDP2), (2, {**FSDP2, "microbatches": 2}), (4, {**TP_PP, "microbatches": 2}), (4, {**PP2, "microbatches": 2})],
    ids=name_of,
)
def test_batch_norm_is_gradient_accumulation(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    """Statistics of one microbatch, averages updated once for each, dp rank 0's kept; two steps of an optimizer."""
    check(pool, "norms", ranks, how, learn=True)
