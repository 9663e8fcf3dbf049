"""Evaluation throughput on GPUs, SpikingJelly's own evaluator and snnpart in turn: 224x224, batch 128, bfloat16, T = 4.

    python tools/bench/vision_eval.py                     all points this machine has GPUs for
    python tools/bench/vision_eval.py --points "1GPU"     those whose name holds the text (may be repeated)

Options, rows and the plot are those of `vision_train.py`. The peer is `vision.evaluate_classification` in its best mode
for the topology, on an artifact of the same network. Writes docs/results/vision_eval.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.vision_points import Point  # noqa: E402
from tools.bench.vision_rows import Bench, main  # noqa: E402


def points() -> Iterator[Point]:
    """Rows on two GPUs first."""
    for model in ("SEW-ResNet34", "Spikformer-S"):
        for topology in ("DDP2", "TP2", "PP2"):
            copies = 2 if topology == "DDP2" else 1
            yield Point(model, topology, 128 * copies, (("eager", 3.0),), size=224)
    for model in ("SEW-ResNet34", "Spikformer-S"):
        yield Point(model, "1GPU", 128, (("cuda_graph", 3.0), ("eager", 0.0)), size=224)


if __name__ == "__main__":
    sys.exit(main(Bench("vision_eval", points, ("--evaluate",)), __doc__ or ""))
