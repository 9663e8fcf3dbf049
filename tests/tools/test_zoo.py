"""The zoo of public models: a covering subset here, the rest under the marker `all`."""

from __future__ import annotations

import pytest
import torch

from snnpart.frameworks import preserved, reset_state
from tests.calibrate import rates, silent
from tools.bench.rows import COLUMNS
from tools.zoo import run
from tools.zoo.catalogue import EVERY, ZOO
from tools.zoo.check import TOPOLOGIES, Outcome, check

QUICK = {
    "B01-ADD": (2, 2, 2),
    "B05": (2, 1, 2),
    "B08": (2, 1, 1),
    "B09-vgg": (1, 2, 2),
    "B10-depthwise": (2, 2, 2),
    "B11-eval": (2, 1, 1),
    "B15-hidden": (2, 2, 2),
    "B16-regression": (2, 1, 2),
    "B17-speech": (2, 1, 1),
    "B18-events": (2, 2, 2),
}
"""A topology for each of these networks that runs in every test run."""
REFUSED = {
    "B15-closed-over": r"ConfigError: network 'ClosedOver': .*snntorch_nets.py:\d+: return x.view\(batch_size, -1\)"
}


def every() -> list[object]:
    """All networks on all topologies; what is not in `QUICK` belongs to the long matrix."""
    return [
        pytest.param(
            name,
            how,
            id=f"{name}-tp{how[0]}-pp{how[1]}-mb{how[2]}",
            marks=[] if QUICK.get(name) == how else [pytest.mark.all],
        )
        for name in ZOO
        for how in TOPOLOGIES
    ]


@pytest.mark.parametrize("name, how", every())
def test_equal_to_one_process_or_refused_by_name(name: str, how: tuple[int, int, int]) -> None:
    outcome = check(ZOO[name], *how)
    if QUICK.get(name) == how:
        assert outcome.verdict == "equal", outcome
    assert outcome.verdict in ("equal", "refused"), outcome
    if outcome.verdict == "refused":
        assert outcome.note.partition(":")[0] in ("TraceError", "PlanError", "ConfigError", "VerifyError")


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_module_and_line(name: str) -> None:
    import re

    assert re.match(REFUSED[name], check(ZOO[name], 1, 2, 2).note)


@pytest.mark.parametrize("name", [name for name in QUICK if name in ZOO])
def test_every_neuron_layer_fires(name: str) -> None:
    entry = ZOO[name]
    module, inputs = entry.make()
    with preserved(module):
        reset_state(module)
        found = rates(module, lambda: entry.call(module, inputs))
    assert found and not silent(found)


def test_every_model_of_the_list_is_there() -> None:
    numbers = {int(name[1:3]) for name in EVERY}
    assert numbers == {*range(1, 13), *range(15, 20)}


def test_a_wrong_result_is_a_failed_row() -> None:
    good = run.row("B05", "simulated tp2 pp1 mb1", Outcome("equal", difference=1e-16, sharded=0.98))
    assert tuple(good) == COLUMNS
    assert good["status"] == "ok" and good["ours"] == "1e-16" and "98% of the parameters" in good["note"]
    refused = run.row("B05", "simulated tp2 pp1 mb1", Outcome("refused", "PlanError: module 'x'"))
    assert refused["status"] == "ok" and refused["metric"] == "refused" and refused["note"].startswith("PlanError")
    bad = run.row("B05", "processes dp2", Outcome("differs", "gradient stem.weight by 0.2", 0.2))
    assert bad["status"] == "failed"
    assert "| B05 |" in run.page([good, refused, bad]) and "gradient stem.weight" in run.page([bad])


def test_the_check_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.zoo import check as checks

    original = checks.simulated

    def spoilt(*given: object) -> checks.Ran:
        ran = original(*given)  # type: ignore[arg-type]
        name = next(name for name, grad in ran.gradients.items() if grad is not None)
        wrong = {**ran.gradients, name: torch.zeros_like(ran.gradients[name])}  # type: ignore[arg-type]
        return checks.Ran(ran.outputs, ran.loss, wrong, ran.buffers)

    monkeypatch.setattr(checks, "simulated", spoilt)
    assert check(ZOO["B09-vgg"], 2, 1, 1).verdict == "differs"
