"""B15, B16: the forms in which snnTorch's tutorials write one convolutional network, and its recurrent ones."""

from __future__ import annotations

from typing import Any

import snntorch as snn
import torch
import torch.nn.functional as F
from snntorch import surrogate, utils
from torch import Tensor, nn

batch_size = 4
GRAD = surrogate.fast_sigmoid(slope=25)


class Explicit(nn.Module):
    """[N, 1, 12, 12] -> spikes and membranes [T, N, 5]: state by hand, pooling of currents, the loop inside."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.conv1, self.lif1 = nn.Conv2d(1, 6, 3), snn.Leaky(beta=0.8, spike_grad=GRAD)
        self.conv2, self.lif2 = nn.Conv2d(6, 7, 3), snn.Leaky(beta=0.8, spike_grad=GRAD)
        self.fc1, self.lif3 = nn.Linear(7, 5), snn.Leaky(beta=0.8, spike_grad=GRAD)

    def flatten(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mem1, mem2, mem3 = self.lif1.init_leaky(), self.lif2.init_leaky(), self.lif3.init_leaky()
        spk3_rec, mem3_rec = [], []
        for _ in range(self.steps):
            spk1, mem1 = self.lif1(F.max_pool2d(self.conv1(x), 2), mem1)
            spk2, mem2 = self.lif2(F.max_pool2d(self.conv2(spk1), 3), mem2)
            spk3, mem3 = self.lif3(self.fc1(self.flatten(spk2)), mem3)
            spk3_rec.append(spk3)
            mem3_rec.append(mem3)
        return torch.stack(spk3_rec), torch.stack(mem3_rec)


class ClosedOver(Explicit):
    """The same with the module's `batch_size` where the batch's own size belongs."""

    def flatten(self, x: Tensor) -> Tensor:
        return x.view(batch_size, -1)


def hidden() -> nn.Module:
    """One step a call; the last layer gives (spikes, membrane); loop and reset are the user's."""
    options: dict[str, Any] = {"beta": 0.8, "spike_grad": GRAD, "init_hidden": True}
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.MaxPool2d(2),
        snn.Leaky(**options),
        nn.Conv2d(6, 7, 3),
        nn.MaxPool2d(3),
        snn.Leaky(**options),
        nn.Flatten(),
        nn.Linear(7, 5),
        snn.Leaky(**options, output=True),
    )


class Regression(nn.Module):
    """[T, N, 12] -> membranes [T, N, 4]: all-to-all recurrence inside the first neuron, odd width."""

    def __init__(self, wide: int = 12, hidden: int = 9, out: int = 4) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(wide, hidden), nn.Linear(hidden, out)
        self.rlif1 = snn.RLeaky(beta=0.8, linear_features=hidden, spike_grad=GRAD)
        self.li_out = snn.Leaky(beta=0.5, threshold=1.0, learn_beta=True, spike_grad=GRAD, reset_mechanism="none")

    def forward(self, x: Tensor) -> Tensor:
        spk1, mem1 = self.rlif1.init_rleaky()
        mem2 = self.li_out.init_leaky()
        record = []
        for step in range(x.shape[0]):
            spk1, mem1 = self.rlif1(self.hidden(x[step]), spk1, mem1)
            _, mem2 = self.li_out(self.out(spk1), mem2)
            record.append(mem2)
        return torch.stack(record, dim=0)


class AutoEncoder(nn.Module):
    """[N, 1, 8, 8] -> [N, T, 1, 8, 8]: an encoder, a latent layer, a decoder of transposed convolutions."""

    def __init__(self, steps: int = 2) -> None:
        super().__init__()
        self.steps = steps
        options: dict[str, Any] = {"beta": 0.8, "spike_grad": GRAD, "init_hidden": True}
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 5, 3, 2, 1), nn.BatchNorm2d(5), snn.Leaky(**options), nn.Flatten(), nn.Linear(80, 7),
            snn.Leaky(**options),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(7, 80), snn.Leaky(**options), nn.Unflatten(1, (5, 4, 4)),
            nn.ConvTranspose2d(5, 6, 3, 2, 1, output_padding=1), nn.BatchNorm2d(6), snn.Leaky(**options),
            nn.ConvTranspose2d(6, 1, 3, 1, 1), snn.Leaky(**options, output=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        utils.reset(self.encoder)
        utils.reset(self.decoder)
        record = []
        for _ in range(self.steps):
            _, membrane = self.decoder(self.encoder(x))
            record.append(membrane)
        return torch.stack(record, dim=1)
