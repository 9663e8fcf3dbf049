"""One measurement for `gpu_loops.py`: a network's own eager loop, or (`--ours`) snnpart. Prints `RESULT {json}`."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from snnpart import parallelize  # noqa: E402
from snnpart.frameworks import reset_state  # noqa: E402
from tools.bench.side import rate, tell  # noqa: E402
from tools.bench.turn import wait_for_turn  # noqa: E402

T_LOOP, CLASSES = 25, 10


@dataclass(frozen=True)
class Network:
    """How a network is made, what it is called on, and how snnpart is told so. `loop`: T calls of one step, by hand."""

    make: Callable[[], nn.Module]
    batch: int
    size: int
    channels: int = 3
    loop: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class Answers(nn.Module):
    """Images [N, C, H, W] at each of T steps -> the mean over T of a multi-step network's answers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x.unsqueeze(0).repeat(4, 1, 1, 1, 1))
        return out.mean(0)


def spikingjelly(path: str, name: str, **arguments: Any) -> Callable[[], nn.Module]:
    """A network of SpikingJelly's zoo with LIF neurons, in multi-step mode."""

    def make() -> nn.Module:
        import importlib

        from spikingjelly.activation_based import functional, neuron

        module = importlib.import_module(f"spikingjelly.activation_based.model.{path}")
        made = getattr(module, name)(spiking_neuron=neuron.LIFNode, **arguments)
        functional.set_step_mode(made, "m")
        return Answers(made)

    return make


def qkformer() -> nn.Module:
    """SpikingJelly's QKFormer, which repeats an image over its T itself."""
    from spikingjelly.activation_based.model.qkformer import qkformer_10_384

    return qkformer_10_384(T=4, num_classes=CLASSES)


class Convolutional(nn.Module):
    """Two convolutions and a linear layer, each with a layer of neurons: the step of the tutorials, [N, 1, 28, 28]."""

    def __init__(self, neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.n1 = nn.Conv2d(1, 12, 5), neuron()
        self.conv2, self.n2 = nn.Conv2d(12, 64, 5), neuron()
        self.fc, self.n3 = nn.Linear(64 * 4 * 4, CLASSES), neuron()

    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(F.max_pool2d(self.conv1(x), 2))
        x = self.n2(F.max_pool2d(self.conv2(x), 2))
        out: Tensor = self.n3(self.fc(x.flatten(1)))
        return out


def snntorch_net() -> nn.Module:
    import snntorch as snn
    from snntorch import surrogate

    return Convolutional(lambda: snn.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid(slope=25), init_hidden=True))


def norse_net() -> nn.Module:
    """[T, N, 1, 28, 28] in; Norse's container keeps the state of each layer within a call of a step."""
    import norse.torch as norse

    return norse.SequentialState(
        nn.Conv2d(1, 12, 5), nn.MaxPool2d(2), norse.LIFCell(), nn.Conv2d(12, 64, 5), nn.MaxPool2d(2), norse.LIFCell(),
        nn.Flatten(), nn.Linear(64 * 4 * 4, CLASSES),
    )  # fmt: skip


class NorseLoop(nn.Module):
    """The loop over T around `norse_net`: the sum of its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = norse_net()

    def forward(self, x: Tensor) -> Tensor:
        state, answers = None, []
        for _ in range(T_LOOP):
            out, state = self.network(x, state)
            answers.append(out)
        return torch.stack(answers).mean(0)


class SnntorchLoop(nn.Module):
    """The loop over T around `snntorch_net`: the mean of its spikes; the state is reset before."""

    def __init__(self) -> None:
        super().__init__()
        self.network = snntorch_net()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.network(x) for _ in range(T_LOOP)]).mean(0)


NETWORKS: dict[str, Network] = {
    "snnTorch-conv": Network(SnntorchLoop, 128, 28, 1, loop=True),
    "Norse-conv": Network(NorseLoop, 128, 28, 1, loop=True),
    "SEW-ResNet18": Network(spikingjelly("sew_resnet", "sew_resnet18", cnf="ADD"), 32, 128),
    "SEW-ResNet50": Network(spikingjelly("sew_resnet", "sew_resnet50", cnf="ADD"), 32, 128),
    "Spiking-VGG11": Network(spikingjelly("spiking_vgg", "spiking_vgg11_bn"), 32, 128),
    "QKFormer": Network(qkformer, 32, 128),
}


def our_step(network: Network, module: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    kernels = {"fuse": True, "channels_last": True}
    program = parallelize(module, example_inputs=x[:4], input_layout="NCHW", verify="off", **kernels, **network.options)
    wait_for_turn()
    running = program.launch(
        lambda params: torch.optim.AdamW(params, lr=1e-3), device="cuda", precision="bf16", execution="auto"
    )
    batch = x.cuda(), y.cuda()
    return lambda: running.train_step(*batch, F.cross_entropy)


def own_step(module: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """The user's own loop."""
    wait_for_turn()
    module.cuda()
    x, y = x.cuda(), y.cuda()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = F.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        reset_state(module)
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=NETWORKS, required=True)
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    network = NETWORKS[asked.model]
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    module = network.make()
    x = torch.randn(asked.batch, network.channels, asked.size, asked.size)
    y = torch.randint(0, CLASSES, (asked.batch,))
    step = our_step(network, module, x, y) if asked.ours else own_step(module, x, y)
    for _ in range(asked.warm):
        step()
    rounds = [rate(lambda _: step(), asked.batch, asked.steps) for _ in range(asked.rounds)]
    memory = torch.cuda.max_memory_reserved()
    tell({"images_per_second": statistics.median(rounds), "rounds": rounds, "peak_memory_bytes": memory})


if __name__ == "__main__":
    main()
