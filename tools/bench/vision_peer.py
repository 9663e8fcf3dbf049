"""One measurement of SpikingJelly's own distributed vision trainer; run by torchrun. Prints `RESULT {json}` on rank 0.

Throughput is what the trainer itself reports, after its warm-up steps. Peak memory is the allocator's largest
reservation over all ranks, as for ours.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side import tell  # noqa: E402
from tools.bench.turn import wait_for_turn  # noqa: E402
from tools.bench.vision_images import images_of  # noqa: E402
from tools.bench.vision_models import NAMES, config  # noqa: E402


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """`count` samples that go round among a few images."""

    def __init__(self, count: int, size: int, images: str | None = None) -> None:
        self.images, self.classes = images_of(images, size)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        index %= len(self.images)
        return self.images[index], self.classes[index]


def datasets(count: int, size: int, validation: int) -> tuple[Repeated, Repeated]:
    """What the trainer's configuration names as the builder of its data."""
    return Repeated(count, size), Repeated(validation, size)


def evaluation_data(count: int, size: int, images: str | None) -> Repeated:
    """What the evaluator's configuration names as the builder of its data."""
    return Repeated(count, size, images)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=NAMES, default=NAMES[0])
    parser.add_argument("--batch", type=int, default=32, help="images a step of each data-parallel rank")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--dp", default="ddp")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--mode", default="eager")
    parser.add_argument("--images", help="what evaluations read, see vision_images.py; default random images")
    parser.add_argument("--workers", type=int, default=8, help="of its data loader, whose time it leaves out")
    parser.add_argument("--rounds", type=int, default=1, help="its measurement is as many times as long")
    parser.add_argument("--evaluate", action="store_true", help="measure evaluations, not train steps")
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def train(asked: argparse.Namespace) -> dict[str, Any]:
    from spikingjelly.activation_based.distributed import vision
    from spikingjelly.activation_based.precision import PrecisionConfig

    dp = int(os.environ["WORLD_SIZE"]) // (asked.tp * asked.pp)
    steps = asked.warm + asked.steps * asked.rounds
    data = {"count": asked.batch * dp * (steps + 2), "size": asked.size, "validation": asked.batch * dp}
    found = vision.train_classification(
        vision.TrainingConfig(
            model=config(asked.model, asked.size),
            dataset_builder="tools.bench.vision_peer.datasets",
            dataset_kwargs=data,
            batch_size=asked.batch,
            workers=asked.workers,
            data_parallel=asked.dp,
            tensor_parallel_size=asked.tp,
            pipeline_parallel_size=asked.pp,
            pipeline_microbatches=asked.microbatches,
            precision=PrecisionConfig(mode="bf16"),
            execution_mode=asked.mode,
            max_steps=steps,
            timing_warmup_steps=asked.warm,
        )
    )
    return {
        "images_per_second": found["images_per_second"],
        "peak_memory_bytes": found["peak_reserved_memory_bytes"],
        "peak_allocated_bytes": found["peak_memory_bytes"],
    }


def evaluate(asked: argparse.Namespace) -> dict[str, Any]:
    """Its evaluator on an artifact as its export writes it, with the weights of a new network."""
    from spikingjelly.activation_based.distributed import vision
    from spikingjelly.activation_based.precision import PrecisionConfig

    dp = int(os.environ["WORLD_SIZE"]) // (asked.tp * asked.pp)
    path = Path(tempfile.gettempdir()) / f"peer-{os.environ['RANK']}-{os.getpid()}.pt"
    model = config(asked.model, asked.size)
    torch.manual_seed(0)
    weights = model.get_builder_cls()(model)._build_canonical_model().state_dict()
    data = {"count": asked.batch * dp * asked.steps * asked.rounds, "size": asked.size, "images": asked.images}
    torch.save({"schema_version": 2, "model_config": model.as_dict(), "state_dict": weights, "source": {}}, path)
    found = vision.evaluate_classification(
        vision.EvaluationConfig(
            artifact=path,
            dataset_builder="tools.bench.vision_peer.evaluation_data",
            dataset_kwargs=data,
            batch_size=asked.batch,
            workers=asked.workers,
            data_parallel="fsdp2" if asked.dp == "fsdp2" else "replicate",
            tensor_parallel_size=asked.tp,
            pipeline_parallel_size=asked.pp,
            pipeline_microbatches=asked.microbatches,
            precision=PrecisionConfig(mode="bf16"),
            execution_mode=asked.mode,
            timing_warmup_batches=min(asked.warm, asked.steps),
        )
    )
    path.unlink()
    memory = torch.cuda.max_memory_reserved()
    return {"images_per_second": found["images_per_second"], "peak_memory_bytes": memory}


def main() -> None:
    asked = options()
    import spikingjelly.activation_based.distributed.vision  # noqa: F401  before its turn

    wait_for_turn()
    tell(evaluate(asked) if asked.evaluate else train(asked))


if __name__ == "__main__":
    main()
