"""Networks of the cases that people who split spiking networks over ranks meet, in float64 and without random numbers.

Each case says how the network is called, where its batch is, and what one process must give.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from spikingjelly.activation_based.neuron import LIFNode
from torch import Tensor, nn

from tests.distributed.case import Case, fill, reset
from tests.distributed.cases_tied import TIED
from tests.neurons import LIF, Spike
from tests.neurons import data as det


class Stage(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(i, o), LIF()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.n(self.l(x))
        return out


class NT(nn.Module):
    """[N, T, C] in, [T, N, C] out."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(3, 4), LIF(vth=0.4)

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        x = x.permute(1, 0, 2)
        return torch.stack([self.n(self.l(x[t])) for t in range(x.shape[0])])


class Block(nn.Module):
    """A norm that is defined and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.l, self.n = nn.LayerNorm(4), nn.Linear(4, 4), LIF()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.n(self.l(x))
        return out


class Skip(nn.Module):
    """A value of the first stage that later ones need."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.n, self.h = nn.ModuleList(LIF(vth=0.4) for _ in range(4)), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        p = self.n[0](self.a(x))
        q = self.n[1](self.b(p))
        r = self.n[2](self.c(q))
        u = self.n[3](self.d(r)) + p
        out: Tensor = self.h(torch.cat([p, q, u], -1))
        return out


class Norms(nn.Module):
    """Convolutions with batch norms and a residual: what BatchNorm does under dp and microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1, self.n1 = nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), LIF(vth=0.1)
        self.c2, self.b2, self.n2 = nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5), LIF(vth=0.1)
        self.h = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(self.b1(self.c1(x)))
        x = x + self.n2(self.b2(self.c2(x)))
        out: Tensor = self.h(x.mean((2, 3)))
        return out


class Digits(nn.Module):
    """[T, N, 1, 8, 8] -> [T, N, 10], float32."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.n = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), LIF(vth=0.5)
        self.d, self.e, self.m = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), LIF(vth=0.5)
        self.h = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        reset(self)
        outputs = []
        for step in x:
            z = self.n(self.b(self.c(step)))
            z = F.avg_pool2d(z + self.m(self.e(self.d(z))), 2)
            outputs.append(self.h(z.flatten(1)))
        return torch.stack(outputs)


class Aux(nn.Module):
    """Two answers, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n, self.first, self.second = nn.Linear(4, 6), LIF(), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.n(self.l(x))
        return self.first(z), self.second(z)


class Still(nn.Module):
    """The last stage of a pipeline has nothing to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n, self.h = nn.Linear(4, 6), LIF(vth=0.1), nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.h(self.n(self.l(x)))
        return out


class Narrow(nn.Module):
    """Layers of three and two channels, for more ranks than that."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1, self.n1 = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), LIF(vth=0.1)
        self.g, self.c2, self.n2 = nn.GroupNorm(1, 3), nn.Conv2d(3, 2, 3, padding=1), LIF(vth=0.05)
        self.h = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(self.b1(self.c1(x)))
        x = self.n2(self.c2(F.max_pool2d(self.g(x), 2)))
        out: Tensor = self.h(x.mean((2, 3)))
        return out


class Tied(nn.Module):
    """A language model with one matrix at both ends: tokens [N, 6] -> [N, 6, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.l, self.n = nn.Embedding(7, 4), nn.Linear(4, 4), LIF(vth=0.4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        reset(self)
        x = self.emb(tokens)
        o = torch.stack([self.n(self.l(x[:, t])) for t in range(x.shape[1])], 1)
        out: Tensor = self.head(self.norm(o + x))
        return out


class Naive(torch.autograd.Function):
    """A spike whose surrogate, the derivative of a steep sigmoid, overflows in float32 (case A23)."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (u,) = ctx.saved_tensors
        return grads[0] * 25 * torch.exp(-25 * u) / (torch.exp(-25 * u) + 1) ** 2


class Overflowing(nn.Module):
    """The last of four hidden channels is far below its threshold: [N, 3] -> [N, 2], float32."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.h = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.h(Naive.apply(self.l(x)))
        return out


def overflowing() -> nn.Module:
    model = fill(Overflowing(), scale=0.3).float()
    with torch.no_grad():
        model.l.bias[3] = -5.0
    return model


class Mobile(nn.Module):
    """Depthwise and pointwise convolutions, a grouped one, residuals: [N, 3, 8, 8] -> [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.b0, self.n0 = (
            nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(6),
            LIF(vth=0.1),
        )
        self.up, self.b1, self.n1 = nn.Conv2d(6, 10, 1, bias=False), nn.BatchNorm2d(10), LIF(vth=0.1)
        self.depth = nn.Conv2d(10, 10, 3, padding=1, groups=10, bias=False)
        self.b2, self.n2 = nn.BatchNorm2d(10), LIF(vth=0.1)
        self.down, self.b3 = nn.Conv2d(10, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.group, self.n3 = nn.Conv2d(6, 8, 3, padding=1, groups=2), LIF(vth=0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n0(self.b0(self.stem(x)))
        y = self.n2(self.b2(self.depth(self.n1(self.b1(self.up(x))))))
        x = x + self.b3(self.down(y))
        out: Tensor = self.head(self.n3(self.group(x)).mean((2, 3)))
        return out


class Plif(nn.Module):
    """Thresholds of every channel and one learned time constant; time in dim 0 (case A12)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.th, self.w = nn.Parameter(torch.linspace(0.1, 0.9, channels)), nn.Parameter(torch.tensor(0.3))

    def forward(self, xs: Tensor) -> Tensor:
        v: Any = 0
        out = []
        for x in xs:
            v = v + (x - v) * self.w.sigmoid()
            z = Spike.apply(v - self.th)
            v = v * (1 - z.detach())
            out.append(z)
        return torch.stack(out)


def thresholds() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 7), Plif(7), nn.Linear(7, 5), Plif(5)).double()
    fill(model[0], scale=0.9)
    fill(model[2], k=0.51, scale=0.9)
    return model


def mlp(scale: float = 0.5, **lif: Any) -> nn.Module:
    return fill(nn.Sequential(nn.Linear(4, 6), LIF(**lif), nn.Linear(6, 3), LIF()), scale=scale)


def ce_over_time(out: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of every step of [T, N, C], averaged over T."""
    return torch.stack([F.cross_entropy(step, target) for step in out]).mean()


CASES: dict[str, Case] = {
    "A01": Case(
        lambda: mlp(),
        lambda: [(det(5, 8, 4), det(5, 8, 3, k=0.2))],
        batch_dim=1,
        target_dim=1,
        options={"input_layout": "TNF", "time_steps": 5},
    ),
    "A04": Case(lambda: mlp(), lambda: [(det(5, 4, k=0.7 + 0.1 * i), torch.ones(5, 3).double()) for i in range(3)]),
    "A05": Case(
        lambda: fill(nn.Sequential(nn.Linear(4, 6), LIF(vth=0.4), nn.Linear(6, 3), LIF(vth=0.2)), scale=0.9),
        lambda: [(det(n, 4) * 2, det(n, 3, k=0.2)) for n in (5, 5, 3, 5)],
    ),
    "A09": Case(
        lambda: nn.Sequential(fill(Stage(4, 6)), fill(Stage(6, 3), k=0.51)), lambda: [(det(4, 4), det(4, 3, k=0.2))]
    ),
    "A10": Case(
        lambda: fill(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1)), scale=0.9),
        lambda: [(det(2, 2, 5, 5), det(2, 6, 5, 5, k=0.11))],
    ),
    "A14": Case(
        lambda: fill(Skip(), scale=0.9),
        lambda: [(det(6, 5, 4) * 2, det(6, 5, 2, k=0.2))],
        batch_dim=1,
        target_dim=1,
        options={"input_layout": "TNF", "time_steps": 6},
    ),
    "A26": Case(
        lambda: fill(NT(), scale=0.9),
        lambda: [(det(6, 4, 3) * 2, torch.tensor([0, 1, 2, 3, 0, 1]))],
        loss=ce_over_time,
        target_dim=0,
    ),
    "A26 N=T": Case(
        lambda: fill(NT(), scale=0.9),
        lambda: [(det(4, 4, 3) * 2, torch.tensor([0, 1, 2, 3]))],
        loss=ce_over_time,
        target_dim=0,
    ),
    "A28": Case(
        lambda: fill(nn.Sequential(Block(), Block(), nn.Linear(4, 2))),
        lambda: [(det(5, 4), torch.ones(5, 2).double()), (det(5, 4, k=0.5), torch.ones(5, 2).double())],
    ),
    "still": Case(
        lambda: fill(Still()),
        lambda: [(det(6, 4, k=0.3 + 0.1 * i), torch.arange(6) % 3) for i in range(2)],
        F.cross_entropy,
    ),
    "wide": Case(
        lambda: fill(
            nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), LIF(vth=0.1)) for _ in range(4)], nn.Linear(4, 3)),
            scale=0.9,
        ),
        lambda: [(det(10, 4) * 2, torch.arange(10) % 3)],
        loss=F.cross_entropy,
    ),
    "leaves": Case(
        lambda: fill(
            nn.Sequential(
                *[nn.Sequential(nn.Linear(4, 4), LIFNode(v_threshold=0.1)) for _ in range(4)], nn.Linear(4, 3)
            ),
            scale=0.9,
        ),
        lambda: [(det(10, 4) * 2, torch.arange(10) % 3)],
        loss=F.cross_entropy,
    ),
    "A12": Case(
        thresholds,
        lambda: [(det(6, 3, 4, k=0.7 + 0.1 * i) * 2, det(6, 3, 5, k=0.11)) for i in range(2)],
        batch_dim=1,
        target_dim=1,
        options={"input_layout": "TNF"},
    ),
    "A23": Case(overflowing, lambda: [(det(5, 3).float(), torch.arange(5) % 2)], loss=F.cross_entropy),
    "mobile": Case(
        lambda: fill(Mobile(), scale=0.9),
        lambda: [(det(6, 3, 8, 8, k=0.3 + 0.2 * i) * 2, torch.arange(6) % 3) for i in range(2)],
        loss=F.cross_entropy,
    ),
    "narrow": Case(
        lambda: fill(Narrow(), scale=0.9),
        lambda: [(det(8, 2, 6, 6, k=0.3 + 0.2 * i) * 2, torch.arange(8) % 3) for i in range(2)],
        loss=F.cross_entropy,
    ),
    "tied": Case(
        lambda: fill(Tied(), scale=0.9),
        lambda: [
            ((torch.arange(24) + i).reshape(4, 6) % 7, (torch.arange(24) + 1).reshape(4, 6) % 7) for i in range(2)
        ],
        loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    ),
    "norms": Case(
        lambda: fill(Norms(), scale=0.9),
        lambda: [(det(8, 2, 5, 5, k=0.3 + 0.2 * i) * 2, torch.arange(8) % 3) for i in range(2)],
        loss=F.cross_entropy,
    ),
} | TIED
