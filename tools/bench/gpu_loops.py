"""Networks against their own eager training on one GPU: SpikingJelly's zoo, and time loops of snnTorch and Norse.

    python tools/bench/gpu_loops.py                       all networks
    python tools/bench/gpu_loops.py --points snnTorch     those whose name holds the text (may be repeated)

Options and rows are those of `vision_train.py`. The peer is the module itself, trained eagerly by a loop with AdamW
(the forward over T steps, loss, backward, step, reset) under the same autocast. Writes docs/results/gpu_loops.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.gpu_loops_side import NETWORKS  # noqa: E402
from tools.bench.vision_points import Point  # noqa: E402
from tools.bench.vision_rows import Bench, main  # noqa: E402


def points() -> Iterator[Point]:
    """Each network at its batch; 8 times is asked for on the loops."""
    for name, network in NETWORKS.items():
        yield Point(name, "1GPU", network.batch, (("eager", 8.0 if network.loop else 0.0),), size=network.size)


if __name__ == "__main__":
    bench = Bench(
        "gpu_loops",
        points,
        peer="the module itself, {mode}",
        scripts=(("gpu_loops_side.py", "--ours"), ("gpu_loops_side.py",)),
    )
    sys.exit(main(bench, __doc__ or ""))
