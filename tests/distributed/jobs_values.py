"""Jobs of `test_values`: networks on the meta device, launched from a source of values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.api import parallelize
from snnpart.live_bytes import LiveBytes
from tests.distributed.cases import LIF, det


class Net(nn.Module):
    """Convolution, norms, attention-like linears and a head tied to an inner layer: [N, 2, 6, 6] -> [N, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.n1 = nn.Conv2d(2, 7, 3, padding=1), nn.BatchNorm2d(7), LIF(vth=0.2)
        self.deep, self.n2 = nn.Conv2d(7, 8, 3, padding=1), LIF(vth=0.0)
        self.mix, self.layer = nn.Linear(8, 8), nn.LayerNorm(8)
        self.first, self.last = nn.Linear(8, 7, bias=False), nn.Linear(8, 7, bias=False)
        self.last.weight = self.first.weight
        self.spare = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n2(self.deep(self.n1(self.norm(self.stem(x))) - 0.5)).mean((2, 3))
        x = self.layer(self.mix(x)) + x
        out: Tensor = self.last(x) + self.first(x * x)
        return out


class Lazy(nn.Module):
    """Layers that take their sizes from the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.n = nn.LazyConv2d(7, 3, padding=1), nn.LazyBatchNorm2d(), LIF(vth=0.1)
        self.h = nn.LazyLinear(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.h(self.n(self.b(self.c(x))).flatten(1))
        return out


def wide() -> nn.Module:
    """Eight equal layers: each is small beside all of them."""
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))])


def blank(kind: type[nn.Module] | Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = kind().double()
    return made


def reference(seed: int = 5) -> nn.Module:
    """The network as one process initialises it."""
    model = blank(Net).to_empty(device="cpu")
    model.last.weight = model.first.weight  # to_empty unties them
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def data() -> tuple[Tensor, Tensor]:
    return det(6, 2, 6, 6) * 2, torch.arange(6) % 7


def drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that follows from its name and shape."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    value = (det(*shape, k=0.9 + 0.01 * len(name)) * 0.5).to(dtype)
    return value.abs() if name.endswith("var") else value


def start(source: str, folder: str, seed: int = 5, **topology: Any) -> dict[str, Any]:
    """Launch the blank network from `source`; its state, one step's loss and gradients, and the state after it."""
    torch.manual_seed(seed)
    values = {
        "reset": lambda: None,
        "mapping": lambda: reference().state_dict(),
        "torch": lambda: Path(folder, "state.pt"),
        "safetensors": lambda: str(Path(folder, "parts")),
        "function": lambda: drawn,
    }[source]()
    x, y = data()
    program = parallelize(blank(Net), example_inputs=x, microbatches=1, **topology)
    options = {} if values is None else {"values": values}
    running = program.launch(**options)
    before = running.state_dict()
    loss = running.train_step(x, y, F.cross_entropy).item()
    result = {"before": before, "loss": loss, "gradients": running.gradients(), "after": running.state_dict()}
    running.close()
    return {**result, "notices": program.compiled.notices}


def lazy(meta: bool) -> dict[str, Any]:
    """Launch a lazy network; sizes, values and one step."""
    torch.manual_seed(3)
    model = blank(Lazy) if meta else Lazy().double()
    x, _ = data()
    program = parallelize(model, example_inputs=x, tp=2)
    running = program.launch()
    state = running.state_dict()
    loss = running.train_step(x, torch.arange(6) % 5, F.cross_entropy).item()
    result = {"state": state, "loss": loss, "gradients": running.gradients()}
    running.close()
    return result


def peak(folder: str, source: str) -> dict[str, int]:
    """Bytes of a rank's slices, and the most that it held while it launched."""
    torch.manual_seed(1)
    model = blank(wide)
    whole = sum(p.numel() * 8 for p in model.parameters())
    program = parallelize(model, example_inputs=torch.zeros(2, 128, dtype=torch.float64), tp=2)
    with LiveBytes() as counter:
        running = program.launch(**({} if source == "reset" else {"values": str(Path(folder, "wide.pt"))}))
    own = sum(p.numel() * 8 for p in running.parameters())
    running.close()
    return {"whole": whole, "own": own, "peak": counter.peak}


def refused(kind: str) -> str:
    """What launch says to a source that is no good."""
    x, _ = data()
    program = parallelize(blank(Net), example_inputs=x, tp=2)
    state = dict(reference().state_dict())
    if kind == "missing":
        del state["mix.weight"]
    elif kind == "shape":
        state["mix.weight"] = torch.zeros(3, 3)
    elif kind == "unlike":
        state["mix.bias"] = state["mix.bias"] + torch.distributed.get_rank()
    try:
        program.launch(values=3 if kind == "type" else state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "launched"
