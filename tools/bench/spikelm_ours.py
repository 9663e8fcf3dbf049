"""One measurement of snnpart on the spiking language model; run by torchrun. Prints `RESULT {json}` on rank 0.

Tokens are random and another batch is copied in every step. A token counts once, whatever T is.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from snnpart import parallelize  # noqa: E402
from tools.bench.side import finish  # noqa: E402
from tools.bench.spikelm_model import SMALL, Sizes, SpikeLM  # noqa: E402
from tools.bench.turn import wait_for_turn  # noqa: E402
from tools.bench.vision_ours import measured  # noqa: E402


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step of each data-parallel rank")
    parser.add_argument("--dp", default="ddp")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--small", action="store_true", help="two layers of 32 channels")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1, help="times that the steps are measured")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step")
    return parser.parse_args()


def loss(logits: Tensor, following: Tensor) -> Tensor:
    """Cross entropy of the next token: logits [B, S, vocabulary], tokens [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def batches_of(sizes: Sizes, asked: argparse.Namespace, copy: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(copy)
    shape = (asked.batch, sizes.tokens + 1)
    made = [torch.randint(sizes.vocabulary, shape, generator=generator) for _ in range(4)]
    pairs = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in made]
    return [(x.pin_memory(), y.pin_memory()) for x, y in pairs] if asked.device == "cuda" else pairs


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    sizes = SMALL if asked.small else Sizes()
    began = time.perf_counter()
    torch.manual_seed(0)
    program = parallelize(
        SpikeLM(sizes),
        example_inputs=torch.zeros(min(asked.batch, 8), sizes.tokens, dtype=torch.long),
        tp=asked.tp,
        pp=asked.pp,
        dp=asked.dp,
        microbatches=asked.microbatches,
        verify="off",
        fuse=asked.device == "cuda",
        channels_last=False,
    )
    compiled = time.perf_counter() - began
    wait_for_turn()
    running = program.launch(
        lambda params: torch.optim.AdamW(params, lr=3e-4),
        device=asked.device,
        execution=asked.mode,
        precision="bf16" if asked.device == "cuda" else "fp32",
    )
    batches = batches_of(sizes, asked, running.ranks.at.dp)

    def step(number: int) -> Tensor:
        return running.train_step(*batches[number % 4], loss)

    found = measured(running, step, asked, "sequences_per_second")
    return {**found, "tokens_per_second": found["sequences_per_second"] * sizes.tokens, "compile_s": compiled}


if __name__ == "__main__":
    finish(measure(options()))
