"""tools/bench/side.py: what a measurement's script tells its runner."""

from __future__ import annotations

import json
import time

import pytest

from tools.bench.side import finish, rate, tell


def test_rate_counts_the_samples_of_numbered_steps() -> None:
    numbers = []

    def step(number: int) -> None:
        numbers.append(number)
        time.sleep(0.01)

    assert 0 < rate(step, batch=4, steps=3) <= 400
    assert numbers == [0, 1, 2]


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), ("0", 1), ("1", 0)])
def test_one_rank_tells(
    rank: str | None, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    for told in (tell, finish):
        told({"images_per_second": 2.5})
        found = capsys.readouterr().out.splitlines()
        assert [json.loads(line.removeprefix("RESULT ")) for line in found] == [{"images_per_second": 2.5}] * lines
