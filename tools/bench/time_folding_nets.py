"""The networks of the time-folding benchmark, as their users write them: a Python loop over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Call = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Net:
    """A network to time. `call` is the user's own forward of one batch: reset, the loop, the answer [N, classes].

    `answer` turns the program's output into the same. `limits` are the smallest ratios by kind of device. `launch` are
    options of the programs' launch. `gpu_only`: it takes more memory than most machines have beside a GPU, or is about
    GPUs.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    call: Call
    options: dict[str, Any] = field(default_factory=dict)
    answer: Callable[[Tensor], Tensor] = lambda out: out
    classes: int = 10
    batch_dim: int = 0
    limits: dict[str, float] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    gpu_only: bool = False


class ConvNet(nn.Module):
    """snnTorch's tutorial 6: two convolutions with pooling, a classifier, T steps on one static image."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        import snntorch as snn

        self.steps = steps
        self.conv1, self.lif1 = nn.Conv2d(1, 12, 5), snn.Leaky(beta=0.5)
        self.conv2, self.lif2 = nn.Conv2d(12, 64, 5), snn.Leaky(beta=0.5)
        self.fc, self.lif3 = nn.Linear(64 * 4 * 4, 10), snn.Leaky(beta=0.5)

    def forward(self, x: Tensor) -> Tensor:
        mem1, mem2, mem3 = self.lif1.init_leaky(), self.lif2.init_leaky(), self.lif3.init_leaky()
        record = []
        for _ in range(self.steps):
            spk1, mem1 = self.lif1(F.max_pool2d(self.conv1(x), 2), mem1)
            spk2, mem2 = self.lif2(F.max_pool2d(self.conv2(spk1), 2), mem2)
            spk3, mem3 = self.lif3(self.fc(spk2.flatten(1)), mem3)
            record.append(spk3 + mem3)
        return torch.stack(record).mean(0)


class Regression(nn.Module):
    """snnTorch's regression tutorial 2: a recurrent layer reads [N, T, features]."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        import snntorch as snn

        self.fc_in = nn.Linear(1, hidden)
        self.cell = snn.RLeaky(beta=0.9, linear_features=hidden)
        self.fc_out, self.read = nn.Linear(hidden, 10), snn.Leaky(beta=0.9, reset_mechanism="none")

    def forward(self, x: Tensor) -> Tensor:
        spk, mem = self.cell.init_rleaky()
        read, record = self.read.init_leaky(), []
        for step in range(x.shape[1]):
            spk, mem = self.cell(self.fc_in(x[:, step]), spk, mem)
            _, read = self.read(self.fc_out(spk), read)
            record.append(read)
        return torch.stack(record).mean(0)


class Sequential(nn.Module):
    """Norse's CIFAR-10 example: a SequentialState in a loop over T."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        import norse.torch as norse

        self.steps = steps
        fast = norse.LIFParameters(tau_mem_inv=torch.tensor(500.0), tau_syn_inv=torch.tensor(300.0))

        def cell() -> nn.Module:
            return norse.LIFCell(fast)

        self.net = norse.SequentialState(
            nn.Conv2d(3, width, 3, padding=1, bias=False), cell(), nn.AvgPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), cell(), nn.AvgPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1, bias=False), cell(), nn.AvgPool2d(4),
            nn.Flatten(), nn.Linear(16 * width, 10), norse.LICell(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        state, record = None, []
        for _ in range(self.steps):
            out, state = self.net(x, state)
            record.append(out)
        return torch.stack(record).max(0).values


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grad / (1 + 10 * u.abs()) ** 2


class Handwritten(nn.Module):
    """Convolutions with BatchNorm and a membrane in local variables."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.steps = steps
        self.conv1, self.norm1 = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2), nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        v1, v2, total = 0.0, 0.0, 0.0
        for _ in range(self.steps):
            v1 = 0.5 * v1 + self.norm1(self.conv1(x))
            one = Spike.apply(v1 - 1)
            v1 = v1 - one.detach()
            v2 = 0.5 * v2 + self.norm2(self.conv2(one))
            two = Spike.apply(v2 - 1)
            v2 = v2 - two.detach()
            total = total + self.head(two.mean((2, 3)))
        return total / self.steps


def sew_resnet(depth: int, mode: str) -> nn.Module:
    from spikingjelly.activation_based import functional, neuron, surrogate
    from spikingjelly.activation_based.model import sew_resnet as zoo

    options = {"spiking_neuron": neuron.LIFNode, "surrogate_function": surrogate.ATan(), "detach_reset": True}
    model = getattr(zoo, f"sew_resnet{depth}")(cnf="ADD", num_classes=10, **options)
    functional.set_step_mode(model, mode)
    return model


class Repeated(nn.Module):
    """A multi-step network that is shown one image for T steps."""

    def __init__(self, net: nn.Module, steps: int) -> None:
        super().__init__()
        self.net, self.steps = net, steps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.unsqueeze(0).repeat(self.steps, 1, 1, 1, 1))
        return out.mean(0)


def once(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def after_reset(model: nn.Module, x: Tensor) -> Tensor:
    from spikingjelly.activation_based import functional

    functional.reset_net(model)
    return once(model, x)


def over_steps(steps: int) -> Call:
    """SpikingJelly's own loop for networks in step mode s."""

    def call(model: nn.Module, x: Tensor) -> Tensor:
        from spikingjelly.activation_based import functional

        functional.reset_net(model)
        return torch.stack([model(x) for _ in range(steps)]).mean(0)

    return call


def loops(quick: bool) -> list[Net]:
    """The networks that are compared with their user's loop."""
    points = [(3, 2, {})] if quick else [(25, 16, {"cpu": 1.6}), (25, 128, {"cpu": 1.25}), (100, 16, {"cpu": 1.7})]
    steps, batch, width, side = (2, 2, 4, 16) if quick else (16, 32, 32, 32)
    at_least = {"cpu": 0.97, "cuda": 0.97}
    sew_steps = 2 if quick else 4
    return [
        *(
            Net(f"snntorch_conv_T{t}_N{n}", lambda t=t: ConvNet(t), (n, 1, 28, 28), once, limits={**at_least, **limit})  # type: ignore[misc]
            for t, n, limit in points
        ),
        Net("snntorch_rleaky", Regression, (batch, 3 if quick else 100, 1), once, limits=at_least),
        Net(
            "norse_sequential", lambda: Sequential(steps, width), (batch, 3, 32, 32), once, limits=at_least,
        ),
        Net("handwritten_lif", lambda: Handwritten(steps, width), (batch, 3, side, side), once, limits=at_least),
        Net(
            "sew_resnet18_s", lambda: sew_resnet(18, "s"), (2 if quick else 8, 3, 2 * side, 2 * side),
            over_steps(sew_steps), {"time_steps": sew_steps}, lambda out: out.mean(0), limits=at_least,
        ),
    ]  # fmt: skip


def statics(quick: bool) -> list[Net]:
    """The networks whose hoisting alone is measured: a batch bound by launches and one bound by the GPU, both eager in
    float32 and as networks are trained on GPUs."""
    if quick:
        return [_repeated("sew_resnet18_hoisting", 18, 2, (2, 3, 32, 32))]
    shapes = {"": (32, 3, 128, 128), "_N256": (256, 3, 128, 128)}
    plain = [_repeated(f"sew_resnet34_hoisting{name}", 34, 4, shape) for name, shape in shapes.items()]
    captured = [
        replace(
            _repeated(f"sew_resnet34_hoisting_bf16{name}", 34, 4, shape),
            options={"fuse": True, "channels_last": True},
            launch={"execution": "cuda_graph", "precision": "bf16", "optimizer": adamw},
            gpu_only=True,
        )
        for name, shape in shapes.items()
    ]
    return [*(replace(net, gpu_only=net.shape[0] > 32) for net in plain), *captured]


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that a captured step ends with."""
    return torch.optim.AdamW(params, lr=1e-3)


def _repeated(name: str, depth: int, steps: int, shape: tuple[int, ...]) -> Net:
    return Net(name, lambda: Repeated(sew_resnet(depth, "m"), steps), shape, after_reset, limits={"cuda": 1.15})
