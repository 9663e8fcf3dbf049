"""A rank that hangs, dies or raises ends the others within the timeout, with its place in the error."""

from __future__ import annotations

import re
import time

import pytest
import torch.nn.functional as F

from snnpart.errors import LaunchError
from tests.distributed.handmade import make_net
from tests.distributed.jobs import batch
from tests.distributed.pool import JobFailed, Pool
from tests.distributed.reference import OneProcess, assert_same

JOBS = "tests.distributed.jobs_pipeline:"
PLAIN = "rank 1 (dp 0, pp 1, tp 0)"
PLACE = re.escape(PLAIN)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("hangs", PLACE + r" is in the loss, stage 1, microbatch 1 for \d+ s"),
        ("dies", PLACE + r" stopped answering \d+ s ago, in the loss, stage 1, microbatch 1"),
        ("raises", PLACE + r" failed in the loss, stage 1, microbatch 1: ValueError: no such loss"),
    ],
)
def test_the_others_name_the_rank_stage_microbatch_and_operation(pool: Pool, how: str, text: str) -> None:
    start = time.monotonic()
    with pytest.raises(JobFailed) as failed:
        pool.run(JOBS + "misbehaves", ranks=2, how=how)
    assert time.monotonic() - start < 25
    error = failed.value.errors[0]
    assert isinstance(error, LaunchError)
    with pytest.raises(LaunchError, match=text):
        raise error
    assert "rank 0 (dp 0, pp 0, tp 0), stage 0" in error.where


def test_who_waits_for_a_rank_that_raised_is_told_at_once(pool: Pool) -> None:
    """Of two pipelines of two: rank 3 raises, whose partner waits for a gradient, and the others for theirs."""
    *others, mine = pool.run(JOBS + "raises_alone", ranks=4, at=3)
    assert mine[:2] == ("ValueError", "no such loss")
    for kind, text, seconds in others:
        assert kind == "LaunchError" and seconds < 15, text
        assert "rank 3 (dp 1, pp 1, tp 0) failed in the loss, stage 1, microbatch 0: ValueError: no such loss" in text


def test_ranks_that_catch_the_same_error_go_on(pool: Pool) -> None:
    """Nobody waits, so nobody is woken or ended; the state is there, and the program can be launched again."""
    for found in pool.run(JOBS + "raise_alike", ranks=2):
        assert found["kind"] == "ValueError" and found["loss"] > 0
        assert_same(found["parameters"], dict(make_net().named_parameters()), 0)


def test_an_error_that_all_ranks_have_breaks_nothing(pool: Pool) -> None:
    """It stayed in the store, and a rank that later waited for a slow one was woken and its program broken."""
    wanted = OneProcess(make_net()).train_step([batch(0, 4), batch(1, 4)], F.cross_entropy)
    for found in pool.run(JOBS + "goes_on_after", ranks=2, how="weights"):
        assert found["text"] == "no such label"
        assert found["losses"] == pytest.approx([wanted] * 3, abs=1e-9)


def test_a_capture_that_failed_breaks_nothing(pool: Pool) -> None:
    """All go on uncaptured, whoever's it was."""
    wanted = OneProcess(make_net()).train_step([batch(0, 4), batch(1, 4)], F.cross_entropy)
    for found in pool.run(JOBS + "goes_on_after", ranks=2, how="capture"):
        assert "steps run uncaptured: the capture failed on rank 1 with ValueError: no such loss" in found["notices"]
        assert found["text"] == ""
        assert found["losses"] == pytest.approx([wanted] * 3, abs=1e-9)


def test_who_waits_for_the_outputs_of_a_stage_that_raised_is_told_at_once(pool: Pool) -> None:
    first, second = pool.run(JOBS + "fails_in_evaluation", ranks=2, where="forward")
    assert second["kind"] == "ValueError" and second["text"] == "no such layer"
    assert first["kind"] == "LaunchError" and first["seconds"] < 15
    assert "stage 0: sharing outputs failed: " in first["text"]
    assert f"{PLAIN} failed in forward, stage 1, microbatch 0: ValueError: no such layer" in first["text"]
    assert "launch again" in first["next"] and "launch again" in second["next"]


def test_a_loss_of_an_evaluation_that_raises_on_one_rank_is_raised_on_all(pool: Pool) -> None:
    """Nobody waits for it, and the next evaluation is as any other."""
    wanted = F.cross_entropy(OneProcess(make_net()).evaluate(batch(0, 4)[0]), batch(0, 4)[1]).item()
    for found in pool.run(JOBS + "fails_in_evaluation", ranks=2, where="loss"):
        assert found["kind"] == "ValueError" and found["text"] == "no such layer" and found["seconds"] < 15
        assert found["next"] == pytest.approx(wanted, abs=1e-9)


def test_a_rank_that_does_not_come_to_the_step(pool: Pool) -> None:
    """Rank 1 is still asleep; the user's own group would wait for 90 seconds."""
    first, _ = pool.run(JOBS + "sleeps_between_steps", ranks=2)
    assert first.startswith("rank 0 (dp 0, pp 0, tp 0), start of a step: agreeing on the batch failed: ")
    assert "rank 1 (dp 0, pp 1, tp 0)" in first and "between steps" in first


def test_a_step_that_raised_leaves_nothing(pool: Pool) -> None:
    (result,) = pool.run(JOBS + "breaks_and_goes_on", ranks=1)
    assert result["kind"] == "ValueError" and result["left"] == {}
    assert_same(result["after"], result["wanted"])


def test_a_pipeline_that_broke_must_be_launched_again(pool: Pool) -> None:
    for kind, text in pool.run(JOBS + "broken_program", ranks=2):
        assert kind == "LaunchError" and "launch again" in text


def test_a_rank_that_connects_late_finds_the_store_still_there(pool: Pool) -> None:
    """Rank 0 closes right after launch; it used to take its store with it before the others had reached it."""
    for text, seconds in pool.run(JOBS + "connects", ranks=2, how="late", timeout=30.0):
        assert text == "" and 1.0 <= seconds < 15


def test_a_store_that_a_rank_does_not_reach_is_named_on_all(pool: Pool) -> None:
    for text, _ in pool.run(JOBS + "connects", ranks=2, how="cut off", timeout=30.0):
        assert text.startswith("rank 1: the store of heartbeats at localhost:"), text
        assert "no route to host" in text and "MASTER_ADDR" in text


def test_rank_0_keeps_its_store_until_the_others_have_left(pool: Pool) -> None:
    """Else their threads write to a store that is gone, and torch prints a stack trace for each."""
    first, second = pool.run(JOBS + "leaves_late", ranks=2)
    assert second["closing"] - 0.05 < first["closed"] and not second["lost"]
