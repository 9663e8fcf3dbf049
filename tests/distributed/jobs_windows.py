"""What the ranks do in the tests of windows: networks whose state goes from step to step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.api import parallelize
from snnpart.errors import SnnpartError
from snnpart.runtime.running import RunningProgram
from tests.distributed.cases import LIF, det, fill
from tests.distributed.jobs import dp_share

STEPS, SAMPLES = 7, 6


def plain() -> nn.Module:
    """Hand-written neurons, one step a call: state lives on the modules."""
    return fill(nn.Sequential(nn.Linear(4, 6), LIF(0.9, vth=1.5), nn.Linear(6, 3), LIF(0.9, vth=1.5)), scale=0.9)


def layers(mode: str = "s") -> nn.Module:
    """SpikingJelly's neurons, with a time constant that is learned."""
    from spikingjelly.activation_based import functional, layer, neuron, surrogate

    options: dict[str, Any] = {"surrogate_function": surrogate.ATan(), "detach_reset": True, "v_reset": 0.05}
    net = nn.Sequential(
        layer.Linear(4, 6), neuron.ParametricLIFNode(init_tau=1.5, v_threshold=0.2, **options), layer.Linear(6, 3),
        neuron.LIFNode(tau=1.5, v_threshold=0.1, **options),
    )  # fmt: skip
    functional.set_step_mode(net, mode)
    return fill(net, scale=0.9)


def hidden() -> nn.Module:
    """snnTorch's neurons with hidden state, one step a call."""
    import snntorch as snn

    from tests.zoo_models import KeepDtype

    options: dict[str, Any] = {"init_hidden": True, "spike_grad": KeepDtype.apply}
    return fill(
        nn.Sequential(
            nn.Linear(4, 6), snn.Leaky(beta=0.9, threshold=1.2, **options), nn.Linear(6, 3),
            snn.Leaky(beta=0.9, threshold=1.2, **options),
        ),
        scale=0.9,
    )  # fmt: skip


def deep() -> nn.Module:
    """Four layers of hand-written neurons."""
    sizes = [(4, 6), (6, 6), (6, 6), (6, 3)]
    parts = [m for a, b in sizes for m in (nn.Linear(a, b, bias=False), LIF(0.9, vth=0.8))]
    return fill(nn.Sequential(*parts), scale=0.9)


class Feedback(nn.Module):
    """One step: its first layer is given what the last one kept of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.first = nn.Linear(4, 3), LIF(0.9, vth=1.0)
        self.fc, self.late = nn.Linear(3, 3), LIF(0.9, vth=1.0)

    def forward(self, x: Tensor) -> Tensor:
        kept = 0.0 if self.late.v is None else self.late.v
        out: Tensor = self.late(self.fc(self.first(self.early(x) + kept)))
        return out


def feedback() -> nn.Module:
    return fill(Feedback(), scale=0.9)


NETS = {"plain": plain, "layers": layers, "hidden": hidden, "deep": deep, "feedback": feedback}


def sequences(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """[T, N, 4] inputs of successive steps, and targets [N]."""
    return [(det(STEPS, SAMPLES, 4, k=0.3 + 0.1 * i) * 2, torch.arange(SAMPLES) % 3) for i in range(count)]


def rate_loss(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of the rates over the steps of [T, N, C]."""
    return F.cross_entropy(out.mean(0) * 3, y)


def masks() -> list[Tensor | None]:
    """Which samples of the whole batch start anew at each step."""
    some = torch.arange(SAMPLES) % 2 == 0
    return [None, some, torch.ones(SAMPLES, dtype=torch.bool)]


def started(net: str, mode: str = "s", **options: Any) -> RunningProgram:
    model = layers(mode) if net == "layers" else NETS[net]()
    chosen = {"time_steps": STEPS} if mode == "s" else {}
    program = parallelize(model, example_inputs=sequences()[0][0], input_layout="TNF", **chosen, **options)
    running = program.launch(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert isinstance(running, RunningProgram)
    return running


def train(net: str, masked: bool = False, mode: str = "s", **options: Any) -> dict[str, Any]:
    """Train steps on successive stretches of the same sequences, then an evaluation that goes on from there."""
    running = started(net, mode, **options)
    losses = []
    for (x, y), mask in zip(sequences(), masks(), strict=True):
        own = {"reset_mask": dp_share(mask, 0, running.ranks)} if masked and mask is not None else {}
        mine = dp_share(x, 1, running.ranks), dp_share(y, 0, running.ranks)
        losses.append(running.train_step(*mine, rate_loss, **own).item())
    out = running.eval_step(dp_share(sequences()[0][0], 1, running.ranks))
    outputs = torch.cat(running.ranks.gather(out, running.ranks.axes["dp"]), 1)
    result = {"losses": losses, "state": running.state_dict(), "outputs": outputs, "notices": list(running.notices)}
    bound = [one for stages in running._signatures._carrying.values() for one in stages.values()]
    result |= {"fold": running.compiled.plan.fold, "moved": {owner for one in bound for _, owner in one.moved}}
    running.close()
    return result


def far_more_samples() -> list[list[str]]:
    """The notices after evaluations of sequences of more and more samples."""
    running, found = started("plain", state="carry", tp=2), []
    for samples in (SAMPLES, 8 * SAMPLES, 9 * SAMPLES, 16 * SAMPLES):
        running.reset()
        running.eval_step(det(STEPS, samples, 4))
        found.append([text for text in running.notices if "the plan was made for" in text])
    running.close()
    return found


def errors() -> dict[str, str]:
    """What is refused on every rank although one rank alone has the problem; a step still works afterwards."""
    running = started("plain", state="carry")
    (x, y), *_ = sequences()
    x, y = x[:, :3], y[:3]
    running.train_step(x, y, rate_loss)
    last = dist.get_rank() == 1
    odd = torch.zeros(3, dtype=torch.bool) if not last else torch.zeros(2, dtype=torch.bool)
    found = {
        "mask": text_of(lambda: running.train_step(x, y, rate_loss, reset_mask=odd)),
        "reset": text_of(lambda: running.reset(odd)),
        "batch": text_of(lambda: running.train_step(x[:, : 2 if last else 3], y[: 2 if last else 3], rate_loss)),
    }
    running.reset()
    running.train_step(x[:, :2], y[:2], rate_loss)
    running.close()
    windows = started("plain", detach_every=3)
    found["no carry"] = text_of(lambda: windows.train_step(x, y, rate_loss, reset_mask=torch.ones(3) > 0))
    longer = torch.cat([x, x]) if last else x
    found["lengths"] = text_of(lambda: windows.train_step(longer, y, rate_loss))
    windows.close()
    return found


def text_of(action: Any) -> str:
    try:
        action()
    except SnnpartError as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"
    return ""
