"""Trains a small network on GPUs under an execution mode, and writes what came of it. Run by torchrun:

    torchrun --nproc-per-node 2 -m tests.gpu.jobs_execution OUT.pt CASE [CASE ...]

A case is `NAME:MODE:PRECISION`; names are those of `TOPOLOGIES`, the precision is fp64, fp32, bf16 or fp16,
or `small`: a few steps of one block in float64, of which little is to be compiled. Rank 0 writes `{case: result}`; a
case that fails has the text of its error as `error`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.api import parallelize
from snnpart.runtime.running import RunningProgram
from tests.distributed.cases import LIF

TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp2": (2, {}),
    "fsdp2": (2, {"dp": "fsdp2"}),
    "fsdp2-kept": (2, {"dp": "fsdp2", "fsdp_units": 3, "fsdp_reshard": False}),
    "fsdp2-again": (2, {"dp": "fsdp2", "fsdp_units": 4, "fsdp_reshard": True}),
    "tp2": (2, {"tp": 2}),
    "pp2-gpipe": (2, {"pp": 2, "schedule": "gpipe", "microbatches": 2}),
    "pp2-1f1b": (2, {"pp": 2, "schedule": "1f1b", "microbatches": 4}),
    "pp2-deep": (2, {"pp": 2, "schedule": "1f1b", "microbatches": 8, "fuse": True, "channels_last": True}),
    "pp2-interleaved": (2, {"pp": 2, "schedule": "interleaved-1f1b", "microbatches": 2}),
    "pp2-tied": (2, {"pp": 2, "schedule": "1f1b", "microbatches": 4, "split_at": ["blocks.2"]}),
    "pp2-zbv": (2, {"pp": 2, "schedule": "zbv", "microbatches": 4}),
}
DEVICE = os.environ.get("CASE_DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
"""cuda:0 has all ranks share one GPU, through gloo."""
STEPS, FEW, BATCH, T = 20, 6, 16, 3
"""Steps of a case, and of a small one."""
LIMIT = float(os.environ.get("CASE_LIMIT", "60"))
UNEVEN = {9: 12, 19: 11}
"""Samples of the whole batch in the steps that have fewer."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c1, self.b1, self.n1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), LIF()
        self.c2, self.b2, self.n2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), LIF()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.n2(self.b2(self.c2(self.n1(self.b1(self.c1(x))))))
        return out


class Net(nn.Module):
    """One step of images [N, 3, 16, 16] -> [N, 10]: a stem, four blocks, dropout where asked for."""

    def __init__(self, dropout: float = 0.0, blocks: int = 4) -> None:
        super().__init__()
        self.c, self.b, self.n = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), LIF()
        self.blocks = nn.Sequential(*(Block(16) for _ in range(blocks)))
        self.drop, self.h = nn.Dropout(dropout), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.n(self.b(self.c(x))))
        out: Tensor = self.h(self.drop(x.mean((2, 3))))
        return out


class Tied(Net):
    """The first convolution of the first block is used again behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = LIF()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.n(self.b(self.c(x))))
        x = x + self.last(self.blocks[0].c1(x))  # type: ignore[operator]
        out: Tensor = self.h(x.mean((2, 3)))
        return out


def make_net(dropout: float = 0.0, tied: bool = False, blocks: int = 4) -> Net:
    torch.manual_seed(0)
    return Tied() if tied else Net(dropout, blocks)


def batch(number: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Images of the whole batch [N, 3, 16, 16] and their classes."""
    size = UNEVEN.get(number, BATCH)
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 3, 16, 16, generator=generator).to(dtype), torch.randint(
        0, 10, (size,), generator=generator
    )


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.mean(0), target)


def dtype_of(precision: str) -> torch.dtype:
    """Of parameters and inputs."""
    return torch.float64 if precision in ("fp64", "small") else torch.float32


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3, fused=True, capturable=DEVICE != "cpu")


def launched(name: str, mode: str, precision: str, dropout: float = 0.0, **options: Any) -> RunningProgram:
    _, topology = TOPOLOGIES[name]
    dtype = dtype_of(precision)
    x, _ = batch(0, dtype)
    share = BATCH // 2 if name.startswith(("ddp", "fsdp")) else BATCH
    program = parallelize(
        make_net(dropout, name == "pp2-tied", 1 if precision == "small" else 4).to(dtype),
        example_inputs=x[:share],
        input_layout="NCHW",
        time_steps=T,
        verify="off",
        **topology,
    )
    assert (name == "pp2-tied") == bool(program.plan.tied)
    running = program.launch(
        device=DEVICE,
        execution=mode,
        precision=precision if precision in ("bf16", "fp16") else "fp32",
        **{"optimizer": adamw, "clip_grad_norm": 1.0, **options},
    )
    assert isinstance(running, RunningProgram)
    return running


def compiled_graphs() -> int:
    """How many graphs torch.compile has compiled in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    found: int = sys.modules["torch._dynamo"].utils.counters["stats"]["unique_graphs"]
    return found


def rate(number: int) -> float:
    """The learning rate of a step: exact in float32, as a captured step keeps it. A spiking network amplifies the last
    bit of a weight to 1e-3 of the loss within ten steps."""
    return 2**-9 * (1 - number / 32)


def train(name: str, mode: str, precision: str) -> dict[str, Any]:
    """Steps with a changing learning rate and uneven batches; a launch in the middle takes over the state."""
    running = launched(name, mode, precision)
    dtype = dtype_of(precision)
    losses: list[Tensor] = []
    notices: list[str] = []
    started, compiled = time.perf_counter(), compiled_graphs()
    for number in range(FEW if precision == "small" else STEPS):
        if number == STEPS // 2 + 2:
            state, inner = running.state_dict(), running.optimizer.state_dict() if running.optimizer else None
            notices += running.notices
            running.close()
            running = launched(name, mode, precision)
            running.load_state_dict(state)
            if running.optimizer is not None:
                running.optimizer.load_state_dict(inner)
        for group in running.optimizer.param_groups if running.optimizer else ():
            group["lr"] = rate(number)
        dp, at = running.ranks.mesh.dp, running.ranks.at.dp
        x, y = (part.tensor_split(dp)[at] for part in batch(number, dtype))
        losses.append(running.train_step(x, y, loss_fn))
    found = [float(loss) for loss in losses]
    seconds = time.perf_counter() - started
    x, y = batch(100, dtype)
    outputs = running.eval_step(x)
    result = {"losses": found, "state": running.state_dict(), "outputs": outputs.cpu(), "seconds": seconds}
    result |= {"notices": notices + list(running.notices), "norm": float(running.grad_norm or 0.0)}
    result |= {"captured": running._execution.captures.captured, "compiled": compiled_graphs() - compiled}
    running.close()
    return result


def main() -> None:
    path, *cases = sys.argv[1:]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    rank = int(os.environ.get("RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    found: dict[str, Any] = {}
    for case in cases:
        name, mode, precision = case.split(":")
        limit = 2 * LIMIT if mode == "compile" else LIMIT
        faulthandler.dump_traceback_later(limit, exit=True)  # a case that hangs ends, and says where
        try:
            found[case] = train(name, mode, precision)
        except Exception:
            found[case] = {"error": traceback.format_exc()[-3000:]}
            if rank == 0:
                torch.save(found, path)
            print(case, "rank", rank, found[case]["error"], file=sys.stderr, flush=True)
            os._exit(1)
        if rank == 0:
            torch.save(found, path)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
