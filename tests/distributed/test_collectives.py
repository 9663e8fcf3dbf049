"""The collectives' values and gradients, as `snnpart.ops` states them, with unequal, interleaved and empty pieces."""

from __future__ import annotations

import pytest
import torch

from snnpart.ops import select_pieces
from tests.distributed.cases import det
from tests.distributed.jobs_launch import PIECES
from tests.distributed.pool import Pool


@pytest.mark.parametrize("last", [None, 0, 1, 2])
@pytest.mark.parametrize("kind", list(PIECES))
def test_values_and_gradients(pool: Pool, kind: str, last: int | None) -> None:
    """In whichever order the values lie and travel."""
    pieces = PIECES[kind]
    whole = [det(2, 7, 3) * (rank + 1) for rank in range(2)]
    own_shape = [select_pieces(whole[0], 1, held).shape for held in pieces]
    weights, mine = det(2, 7, 3, k=0.3), [det(*shape, k=0.3) for shape in own_shape]
    together = torch.zeros(2, 7, 3).double()
    for held, part in zip(pieces, mine, strict=True):
        offset = 0
        for start, stop in held:
            together[:, start:stop] = part[:, offset : offset + stop - start]
            offset += stop - start
    for rank, found in enumerate(pool.run("tests.distributed.jobs_launch:collectives", ranks=2, kind=kind, last=last)):
        wanted = {
            "all_reduce": (whole[0] + whole[1], weights),
            "grad_all_reduce": (whole[rank], 2 * weights),
            "all_gather": (det(2, 7, 3), select_pieces(weights, 1, pieces[rank])),
            "partial": (det(2, 7, 3), 2 * select_pieces(weights, 1, pieces[rank])),
            "bits": ((det(2, 7, 3) > 0).double(), select_pieces(weights, 1, pieces[rank])),
            "four bits": ((5 * det(2, 7, 3)).round(), 2 * select_pieces(weights, 1, pieces[rank])),
            "bool": (det(2, 7, 3) > 0, torch.empty(0)),
            "shard": (select_pieces(whole[rank], 1, pieces[rank]), together),
            "reduce_scatter": (select_pieces(whole[0] + whole[1], 1, pieces[rank]), together),
        }
        for name, (value, grad) in wanted.items():
            torch.testing.assert_close(found[name][0], value, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(
                found[name][1], grad, check_dtype=False, msg=lambda m, n=name: f"{n} gradient: {m}"
            )


def test_sums_do_not_depend_on_the_layout_of_a_rank(pool: Pool) -> None:
    """Autograd may give a gradient channels-last on one rank only; the sum is of the same elements all the same."""
    for total, keeps_layout in pool.run("tests.distributed.jobs_launch:sum_of_layouts", ranks=2):
        torch.testing.assert_close(total, 2 * det(2, 3, 4, 5), rtol=0, atol=1e-12)
        assert keeps_layout
