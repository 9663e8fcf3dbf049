"""One measurement of SpikingJelly's own language-model trainer; run by torchrun. Prints `RESULT {json}` on rank 0.

`distributed.llm.train` on Megatron-Core. The model itself is not in SpikingJelly's package: `--checkout` is its
repository at the same version, whose `benchmark/snn_llm/spikelm.py` has it. It also needs spikingjelly[megatron],
Python 3.12, and, for context parallelism, Transformer Engine.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side import tell  # noqa: E402
from tools.bench.spikelm_model import Sizes  # noqa: E402
from tools.bench.turn import wait_for_turn  # noqa: E402


class Tokens(Dataset[dict[str, Tensor]]):
    """`count` random sequences that go round among a few."""

    def __init__(self, count: int, sizes: Sizes) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(sizes.vocabulary, (64, sizes.tokens + 1), generator=generator)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index % len(self.rows)]
        return {"input_ids": row[:-1], "labels": row[1:]}


def datasets(counts: tuple[int, int, int]) -> tuple[Tokens, Tokens, Tokens]:
    """What the trainer's configuration names as the builder of its data."""
    first, second, third = (Tokens(count, Sizes()) for count in counts)
    return first, second, third


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", required=True, help="SpikingJelly's repository")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step of all ranks")
    parser.add_argument("--micro", type=int, default=1, help="sequences at once of each data-parallel rank")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    return parser.parse_args()


def transformer(asked: argparse.Namespace, sizes: Sizes) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.channels,
        num_attention_heads=sizes.heads,
        ffn_hidden_size=sizes.hidden,
        tensor_model_parallel_size=asked.tp,
        pipeline_model_parallel_size=asked.pp,
        context_parallel_size=asked.cp,
        calculate_per_token_loss=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
    )


def training(asked: argparse.Namespace, sizes: Sizes) -> Any:
    from benchmark.snn_llm.spikelm import SpikeLMConfig
    from megatron.core.optimizer import OptimizerConfig
    from spikingjelly.activation_based.distributed import llm

    model = SpikeLMConfig(
        transformer=transformer(asked, sizes),
        vocab_size=sizes.vocabulary,
        max_sequence_length=sizes.tokens,
        time_steps=sizes.time_steps,
    )
    optimizer = OptimizerConfig(
        lr=3e-4, min_lr=3e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    return llm.TrainingConfig(
        model=model,
        optimizer=optimizer,
        dataset_builder="tools.bench.spikelm_peer.datasets",
        sequence_length=sizes.tokens,
        micro_batch_size=asked.micro,
        global_batch_size=asked.batch,
        train_steps=asked.warm + asked.steps,
        timing_warmup_steps=asked.warm,
    )


def main() -> None:
    asked = options()
    sys.path.insert(0, asked.checkout)
    from spikingjelly.activation_based.distributed import llm

    config = training(asked, Sizes())
    wait_for_turn()
    found = llm.train(config)
    if int(os.environ["RANK"]) == 0:  # the others need not have the figures
        memory = found["peak_reserved_memory_bytes"]
        tell({"tokens_per_second": found["semantic_tokens_per_second"], "peak_memory_bytes": memory})


if __name__ == "__main__":
    main()
