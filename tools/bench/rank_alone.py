"""What one tensor-parallel rank computes in a train step, alone on one GPU: the other rank is torch's fake process
group, whose messages cost nothing and bring nothing.

    python tools/bench/rank_alone.py --model Spikformer-S --tp 2 --batch 256 --profile

The images per second are those of two ranks whose messages all were hidden: an upper bound for the rows TP2 of
`vision_train.py`, measured where there is one GPU. Losses mean nothing here; the arguments are those of
`vision_ours.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from snnpart.runtime.ranks import Ranks  # noqa: E402
from tools.bench.side import finish  # noqa: E402
from tools.bench.vision_ours import measure, options  # noqa: E402


def alike(ranks: Ranks, numbers: Sequence[float], axis: Any = None) -> list[float]:
    """Sums over ranks that all say what this one says."""
    return [ranks.mesh.size * number for number in numbers]


def main() -> None:
    asked = options()
    ranks = asked.tp * asked.pp
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())  # type: ignore[no-untyped-call]
    Ranks.sum = alike  # type: ignore[method-assign]
    finish(measure(asked))


if __name__ == "__main__":
    main()
