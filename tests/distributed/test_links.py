"""A link measured over gloo: the same on all ranks, every kind of collective, larger messages take longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snnpart.costs import CPU, KINDS
from tests.distributed.pool import Pool


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_link_is_measured_alike_on_all_ranks(pool: Pool, ranks: int) -> None:
    links = pool.run("tests.distributed.jobs_links:measured", ranks=ranks)
    assert all(link == links[0] for link in links)
    assert set(links[0].measured) == {f"{kind}/{ranks}" for kind in KINDS}
    for points in links[0].measured.values():
        assert [size for size, _ in points] == [1 << 10, 1 << 16, 1 << 22]
        assert 0 < points[0][1] <= points[1][1] and points[0][1] < points[2][1]
    profile = replace(CPU, links={"tp": links[0]})
    assert profile.all_reduce_us("tp", 1 << 22, ranks) == links[0].measured[f"all_reduce/{ranks}"][2][1]
