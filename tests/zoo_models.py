"""The networks of the zoo. Frameworks are imported by the factories, so that the zoo imports without them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.neurons import SoftLIF


class KeepDtype(torch.autograd.Function):
    """A surrogate in the form snnTorch takes, whose spikes keep the dtype, so that float64 networks run."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grad / (1 + 5 * u.abs()) ** 2


class _LeakyLoop(nn.Module):
    """Tutorial network of snnTorch: convolutions, explicit state, a Python loop over time."""

    def __init__(self, steps: int, **options: Any) -> None:
        super().__init__()
        import snntorch as snn

        self.steps = steps
        self.conv1, self.lif1 = nn.Conv2d(1, 6, 3), snn.Leaky(beta=0.9, **options)
        self.conv2, self.lif2 = nn.Conv2d(6, 8, 3), snn.Leaky(beta=0.8, learn_beta=True, **options)
        self.fc, self.lif3 = nn.Linear(8, 5), snn.Leaky(beta=0.9, reset_mechanism="zero", **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mem1, mem2, mem3 = self.lif1.init_leaky(), self.lif2.init_leaky(), self.lif3.init_leaky()
        spikes, membranes = [], []
        for _ in range(self.steps):
            spk1, mem1 = self.lif1(F.max_pool2d(self.conv1(x), 2), mem1)
            spk2, mem2 = self.lif2(F.max_pool2d(self.conv2(spk1), 2), mem2)
            spk3, mem3 = self.lif3(self.fc(spk2.flatten(1)[:, :8]), mem3)
            spikes.append(spk3)
            membranes.append(mem3)
        return torch.stack(spikes), torch.stack(membranes)


def leaky_loop(steps: int = 4) -> nn.Module:
    return _LeakyLoop(steps, spike_grad=KeepDtype.apply)


def leaky_loop_float32() -> nn.Module:
    from snntorch import surrogate

    return _LeakyLoop(4, spike_grad=surrogate.fast_sigmoid(slope=25))


class _StateLoop(nn.Module):
    """A linear snnTorch network around one kind of neuron whose state is threaded through by hand."""

    def __init__(self, kind: str, steps: int, **options: Any) -> None:
        super().__init__()
        import snntorch as snn

        neuron = getattr(snn, kind)
        self.steps = steps
        self.fc1, self.first = nn.Linear(8, 9), neuron(spike_grad=KeepDtype.apply, **options)
        self.fc2, self.second = nn.Linear(9, 5), neuron(spike_grad=KeepDtype.apply, **options)

    def forward(self, x: Tensor) -> Tensor:
        one: Any = self.first.reset_mem()
        two: Any = self.second.reset_mem()
        out = []
        for _ in range(self.steps):
            spikes, *one = self.first(self.fc1(x), *one)
            spikes, *two = self.second(self.fc2(spikes), *two)
            out.append(spikes)
        return torch.stack(out, dim=1)


def synaptic_loop(steps: int = 5) -> nn.Module:
    return _StateLoop("Synaptic", steps, alpha=0.9, beta=0.8, learn_alpha=True)


def alpha_loop(steps: int = 5) -> nn.Module:
    return _StateLoop("Alpha", steps, alpha=0.9, beta=0.7)


class _RecurrentLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import snntorch as snn

        self.fc, self.cell = nn.Linear(8, 9), snn.RLeaky(beta=0.9, linear_features=9, spike_grad=KeepDtype.apply)
        self.out, self.readout = nn.Linear(9, 4), snn.Leaky(beta=0.9, spike_grad=KeepDtype.apply)

    def forward(self, x: Tensor) -> Tensor:
        spk, mem = self.cell.init_rleaky()
        read, record = self.readout.init_leaky(), []
        for t in range(x.shape[1]):
            spk, mem = self.cell(self.fc(x[:, t]), spk, mem)
            spikes, read = self.readout(self.out(spk), read)
            record.append(read + spikes)
        return torch.stack(record)


def rleaky_loop() -> nn.Module:
    return _RecurrentLoop()


class _ConvLstmLoop(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        import snntorch as snn

        self.steps = steps
        keep = KeepDtype.apply
        self.cell1 = snn.SConv2dLSTM(1, 4, 3, max_pool=2, threshold=0.1, spike_grad=keep)
        self.cell2 = snn.SConv2dLSTM(4, 4, 3, threshold=0.05, spike_grad=keep)
        self.fc = nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        syn1, mem1 = self.cell1.init_sconv2dlstm()
        syn2, mem2 = self.cell2.init_sconv2dlstm()
        out = torch.zeros(())
        for _ in range(self.steps):
            spk, syn1, mem1 = self.cell1(x, syn1, mem1)
            spk, syn2, mem2 = self.cell2(spk, syn2, mem2)
            out = out + self.fc(spk.flatten(1))
        return out


def sconv2dlstm_loop(steps: int = 3) -> nn.Module:
    return _ConvLstmLoop(steps)


def hidden_sequential() -> nn.Module:
    """snnTorch's `init_hidden` form: a Sequential for one step, the loop is the caller's."""
    import snntorch as snn

    options: dict[str, Any] = {"beta": 0.9, "init_hidden": True, "spike_grad": KeepDtype.apply}
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), snn.Leaky(**options), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(150, 5), snn.Leaky(**options)
    )


class _NorseLoop(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        import norse.torch as norse

        self.steps = steps
        fast = norse.LIFParameters(tau_mem_inv=torch.tensor(500.0), tau_syn_inv=torch.tensor(300.0))
        self.net = norse.SequentialState(
            nn.Conv2d(1, 6, 3),
            norse.LIFCell(fast),
            nn.Flatten(),
            nn.Linear(600, 7),
            norse.LIFCell(fast),
            norse.LICell(),
        )

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for _ in range(self.steps):
            y, state = self.net(x, state)
            out.append(y)
        return torch.stack(out).max(0).values


def norse_sequential(steps: int = 4) -> nn.Module:
    return _NorseLoop(steps)


class _Lsnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import norse.torch as norse

        fast = norse.LSNNParameters(tau_mem_inv=torch.tensor(500.0), tau_syn_inv=torch.tensor(300.0))
        self.cell, self.readout = norse.LSNNRecurrentCell(6, 7, p=fast), norse.LILinearCell(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        one, two, out = None, None, []
        for step in x:
            spikes, one = self.cell(step, one)
            y, two = self.readout(spikes, two)
            out.append(y)
        return torch.stack(out)


def norse_lsnn() -> nn.Module:
    net = _Lsnn()
    with torch.no_grad():
        net.cell.input_weights.mul_(6)
    return net


class _FromModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import sinabs

        ann = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(54, 8), nn.ReLU(), nn.Linear(8, 4)
        )
        self.net = sinabs.from_torch.from_model(ann, batch_size=2).spiking_model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.flatten(0, 1))
        return out.unflatten(0, x.shape[:2]).mean(1)


def sinabs_from_model() -> nn.Module:
    return _FromModel()


def sinabs_layers() -> nn.Module:
    import sinabs.layers as layers

    return nn.Sequential(
        nn.Linear(8, 9),
        layers.LIF(tau_mem=20.0, norm_input=False),
        nn.Linear(9, 5),
        layers.ALIF(20.0, 10.0, norm_input=False),
    )


class _Block(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.conv, self.bn, self.lif = nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out), SoftLIF()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lif(self.bn(self.conv(x)))
        return result


class HandWritten(nn.Module):
    """A residual network of hand-written neurons with the time loop in forward."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.stem, self.block, self.head = _Block(3, 7), _Block(7, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Any = 0.0
        for _ in range(self.steps):
            y = self.stem(x)
            y = y + self.block(y)
            out = out + self.head(y.mean((2, 3)))
        return out / self.steps


class UNet(nn.Module):
    """Two levels down, two up, the skips concatenated."""

    def __init__(self, steps: int = 2) -> None:
        super().__init__()
        self.steps = steps
        self.down1, self.down2, self.middle = _Block(1, 4), _Block(4, 6), _Block(6, 6)
        self.up2, self.up1 = nn.ConvTranspose2d(6, 6, 2, stride=2), nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.join2, self.join1, self.head = _Block(12, 6), _Block(8, 4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for _ in range(self.steps):
            one = self.down1(x)
            two = self.down2(F.max_pool2d(one, 2))
            y = self.up2(self.middle(F.max_pool2d(two, 2)))
            y = self.up1(self.join2(torch.cat([y, two], 1)))
            out.append(self.head(self.join1(torch.cat([y, one], 1))))
        return torch.stack(out).sum(0)


class Recurrent(nn.Module):
    """A hand-written recurrent layer: the last step's spikes come back through a weight matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.back, self.lif, self.out = nn.Linear(6, 9), nn.Linear(9, 9), SoftLIF(), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        spikes, out = x.new_zeros(x.shape[0], 9), []
        for t in range(x.shape[1]):
            spikes = self.lif(self.fc(x[:, t]) + self.back(spikes))
            out.append(self.out(spikes))
        return torch.stack(out, 1)


class Tied(nn.Module):
    """Encoder and decoder use one weight matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.lif, self.decode = nn.Linear(8, 8, bias=False), SoftLIF(), nn.Linear(8, 8)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.decode(self.lif(self.encode(x[:, t]))) for t in range(x.shape[1])], 1)
