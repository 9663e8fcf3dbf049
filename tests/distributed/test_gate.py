"""The gate at launch: on every launch of a zoo network it passes and leaves no trace; a wrong gradient is seen."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool

JOBS = "tests.distributed.jobs_gate:"


@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        ("unet", {"tp": 2, "pp": 2, "dp": "ddp"}, 4),
        pytest.param("unet", {"tp": 1, "pp": 2, "dp": "ddp"}, 4, marks=pytest.mark.all),
        ("unet", {"tp": 2, "pp": 1, "dp": "fsdp2"}, 4),
        ("unet", {"tp": 2, "pp": 2, "dp": "ddp", "single": True}, 4),
        ("recurrent", {"tp": 2, "pp": 1, "dp": "ddp"}, 4),
    ],
)
def test_an_intact_program_passes_and_is_as_before(pool: Pool, name: str, options: dict, ranks: int) -> None:
    results = pool.run(JOBS + "intact", ranks=ranks, name=name, **options)
    assert all(untouched for untouched, _ in results)
    assert all(losses == results[0][1] for _, losses in results)
    assert results[0][1][1] != results[0][1][0]


def test_a_wrong_gradient_on_one_rank_is_refused_on_all(pool: Pool) -> None:
    results = pool.run(JOBS + "tampered", ranks=4, name="unet")
    for kind, text in results:
        assert kind == "VerifyError"
        assert "the launched program differs from its simulation: gradient '" in text
        assert "verify=False" in text
