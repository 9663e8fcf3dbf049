"""Training throughput and memory on GPUs, SpikingJelly's own trainer and snnpart in turn.

    python tools/bench/vision_train.py                              all points this machine has GPUs for
    python tools/bench/vision_train.py --points "SEW-ResNet34 1GPU" those whose name holds the text (may be repeated)
    python tools/bench/vision_train.py --again                      also those that are in the CSV already
    python tools/bench/vision_train.py --plot                       only draw the plot from the CSV

Both train the network that SpikingJelly's builder makes, T = 4, 128x128, 1000 classes, AdamW, bfloat16, on synthetic
images: 10 warm-up steps and 40 measured ones in a process of its own, `--repeats` times in turn. The peer is
`vision.train_classification` in its best mode for the topology (on one GPU also its eager mode). Values are medians,
the spread is (max - min) / median of ours. Writes docs/results/vision_train.csv after every point; rows that need more
GPUs than there are stand there as not-run, with the command.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.vision_points import training_points  # noqa: E402
from tools.bench.vision_rows import Bench, main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(Bench("vision_train", training_points), __doc__ or ""))
