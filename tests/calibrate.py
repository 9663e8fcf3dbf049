"""Make a network fire: scale its layers until every neuron layer is active.

Networks at their default initialisation are mostly silent, and a parity test of a silent network proves nothing. The
calibration runs the network and moves, one after the other, every layer with weights so that its output has a given
mean and spread; neuron layers that are then still silent or saturated have the last such layer before them moved
further. It is deterministic and changes parameters and BatchNorm statistics only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart.facts import Domain
from snnpart.frameworks import adapter_for, preserved, reset_state

LOW, HIGH = 0.01, 0.99
_WEIGHTED = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm)


def is_neuron(module: nn.Module) -> bool:
    """Whether the module is a layer that spikes: a framework's, or a hand-written class that says `is_neuron`."""
    adapter = adapter_for(module)
    if adapter.is_neuron(module):
        return adapter.output_domain(module) != Domain("real")
    return bool(getattr(module, "is_neuron", False))


@dataclass
class _Run:
    """What one forward showed: the rate of each neuron layer and the weighted layer called last before it."""

    rates: dict[str, float] = field(default_factory=dict)
    owner: dict[str, str] = field(default_factory=dict)


def rates(model: nn.Module, call: Callable[[], Any]) -> dict[str, float]:
    """The share of non-zero outputs of each neuron layer over all its calls in `call()`."""
    counts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def count(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            spikes = pytree.tree_leaves(output)[0]
            counts[name][0] += float((spikes != 0).sum())
            counts[name][1] += spikes.numel()

        return hook

    handles = [m.register_forward_hook(count(name)) for name, m in model.named_modules() if is_neuron(m)]
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return {name: fired / total for name, (fired, total) in counts.items()}


def silent(found: dict[str, float]) -> dict[str, float]:
    """The layers whose rate proves nothing."""
    return {name: rate for name, rate in found.items() if not LOW < rate < HIGH}


def fire(
    model: nn.Module, call: Callable[[], Any], *, passes: int = 12, mean: float = 0.4, spread: float = 1.2
) -> None:
    """Change the weights of `model` so that every neuron layer fires at a rate within (LOW, HIGH) in `call()`.

    Raises:
        AssertionError: it cannot be made to.
    """
    targets: dict[str, tuple[float, float]] = defaultdict(lambda: (mean, spread))
    _open_closed_branches(model)
    found: dict[str, float] = {}
    for _ in range(passes):
        run = _adjust(model, call, targets)
        with preserved(model):
            reset_state(model)
            found = rates(model, call)
        wrong = {name: rate for name, rate in found.items() if not 2 * LOW < rate < 0.9}
        if not wrong:
            break
        for name, rate in wrong.items():
            if owner := run.owner.get(name):
                old_mean, old_spread = targets[owner]
                up = 1 if rate < 0.5 else -1
                targets[owner] = (old_mean + 0.3 * up, old_spread * (1.25 if up > 0 else 0.9))
    assert found and not silent(found), f"not every neuron layer fires: {silent(found)}"


def _open_closed_branches(model: nn.Module) -> None:
    """Residual branches that are initialised to nothing (a norm with weight 0) pass no gradient: open them."""
    for module in model.modules():
        if (
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.weight is not None
            and not module.weight.any()
        ):
            nn.init.constant_(module.weight, 0.5)


def _adjust(model: nn.Module, call: Callable[[], Any], targets: dict[str, tuple[float, float]]) -> _Run:
    """One forward in which each weighted layer, at its first call, is moved to its target."""
    run, last = _Run(), [""]
    names = {module: name for name, module in model.named_modules()}
    done: set[nn.Module] = set()

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        last[0] = names[module]
        if module in done or not isinstance(output, Tensor):
            return None
        done.add(module)
        return _to_target(module, output, *targets[names[module]])

    def note(module: nn.Module, args: Any) -> None:
        run.owner.setdefault(names[module], last[0])

    handles = [m.register_forward_hook(move) for m in names if isinstance(m, _WEIGHTED)]
    handles += [m.register_forward_pre_hook(note) for m in names if is_neuron(m)]
    before = {m: m.momentum for m in names if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    try:
        for norm in before:
            norm.momentum = 1.0
        reset_state(model)
        with torch.no_grad():
            call()
    finally:
        reset_state(model)
        for handle in handles:
            handle.remove()
        for norm, momentum in before.items():
            norm.momentum = momentum
    return run


def _to_target(module: Any, output: Tensor, mean: float, spread: float) -> Tensor:
    """Scale and shift the layer so that its output has the target's mean and spread; the changed output."""
    deviation = float(output.std()) if output.numel() > 1 else 0.0
    scale = spread / deviation if deviation > 1e-6 else 1.0
    shift = mean - scale * float(output.mean()) if module.bias is not None else 0.0
    if module.weight is None:
        return output
    module.weight.mul_(scale)
    if module.bias is not None:
        module.bias.mul_(scale).add_(shift)
    return output * scale + shift
