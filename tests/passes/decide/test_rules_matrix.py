"""Convolutions and linears of every kind under every rule: channels dealt out or summed up, equal to one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts
from snnpart.errors import PlanError
from snnpart.facts import Placement
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from tests.lowering import assert_parity, compiled, fire

WIDTH, OUT = 6, 7
MADE: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(WIDTH, OUT), ()),
    "linear without bias": (lambda: nn.Linear(WIDTH, OUT, bias=False), ()),
    "conv1d, strided and dilated": (lambda: nn.Conv1d(WIDTH, OUT, 3, stride=2, padding=2, dilation=2), (7,)),
    "conv1d, padding same": (lambda: nn.Conv1d(WIDTH, OUT, 3, padding="same"), (5,)),
    "conv2d, oblong": (lambda: nn.Conv2d(WIDTH, OUT, (3, 1), stride=(1, 2), padding=(1, 0)), (4, 5)),
    "conv2d, padding valid": (lambda: nn.Conv2d(WIDTH, OUT, 2, padding="valid", bias=False), (4, 4)),
    "conv2d, reflect": (lambda: nn.Conv2d(WIDTH, OUT, 3, padding=1, padding_mode="reflect"), (4, 4)),
    "conv2d, circular": (lambda: nn.Conv2d(WIDTH, OUT, 3, padding=(1, 2), padding_mode="circular"), (4, 4)),
    "conv3d, replicate": (lambda: nn.Conv3d(WIDTH, OUT, 3, padding=1, padding_mode="replicate"), (3, 3, 3)),
    "conv3d, dilated": (lambda: nn.Conv3d(WIDTH, OUT, 2, dilation=(1, 2, 1)), (3, 4, 3)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(WIDTH, OUT, 3, stride=2, output_padding=1), (4,)),
    "transposed 2d, dilated": (lambda: nn.ConvTranspose2d(WIDTH, OUT, 3, dilation=2, padding=1, bias=False), (4, 3)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(WIDTH, OUT, 2, stride=2), (2, 2, 2)),
}
GROUPED: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "depthwise 1d": (lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), (5,)),
    "depthwise with a multiplier": (lambda: nn.Conv2d(WIDTH, 2 * WIDTH, 3, groups=WIDTH, bias=False), (4, 4)),
    "groups of two, dilated": (lambda: nn.Conv2d(WIDTH, 9, 3, padding=2, dilation=2, groups=3), (4, 4)),
    "groups, circular": (lambda: nn.Conv2d(WIDTH, 4, 3, padding=1, groups=2, padding_mode="circular"), (4, 4)),
    "depthwise 3d": (lambda: nn.Conv3d(WIDTH, WIDTH, 2, groups=WIDTH), (3, 3, 3)),
    "transposed 1d in groups": (lambda: nn.ConvTranspose1d(WIDTH, 6, 3, groups=2), (4,)),
    "transposed 2d, depthwise": (lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2, groups=WIDTH), (3, 3)),
}


class Net(nn.Module):
    """Spikes of a first layer, the layer in question, and what follows it element by element."""

    def __init__(self, layer: nn.Module, space: tuple[int, ...]) -> None:
        super().__init__()
        first: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        self.first = nn.Linear(3, WIDTH) if not space else first[len(space)](3, WIDTH, 1)  # type: ignore[call-arg]
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(fire(self.first(x))) ** 2
        return out


def lowered(
    made: tuple[Callable[[], nn.Module], tuple[int, ...]], tp: int, rules: dict[str, str]
) -> tuple[nn.Module, tuple[Tensor, ...], CompiledProgram]:
    torch.manual_seed(0)
    layer, space = made
    module = Net(layer(), space).double()
    inputs = (torch.randn(4, 3, *space, dtype=torch.float64),)
    rate = float(fire(module.first(inputs[0])).detach().mean())
    assert 0.01 < rate < 0.99
    return module, inputs, compiled(module, inputs, tp=tp, pinned=Plan(tp=tp, shards=rules))


def rule_of(program: CompiledProgram) -> str:
    """By which rule the layer in question runs."""
    reads = [n for n in program.source.graph.nodes if str(n.target) == "layer.weight"]
    (node,) = {user for read in reads for user in read.users}
    return facts.need(node, Placement).rule


@pytest.mark.parametrize(("tp", "first"), [(2, "column"), (3, "replicate")])
@pytest.mark.parametrize("rule", ["column", "row", "scatter"])
@pytest.mark.parametrize("name", sorted(MADE))
def test_a_layer_under_each_rule(name: str, rule: str, tp: int, first: str) -> None:
    module, inputs, program = lowered(MADE[name], tp, {"first": first, "layer": rule})
    assert rule_of(program) == rule
    shapes = [{t.name: t.shape for t in program.stage(0, rank).tensors}["layer.weight"] for rank in range(tp)]
    whole = module.get_parameter("layer.weight").shape
    dim = next(d for d in range(2) if shapes[0][d] != whole[d])
    assert sum(shape[dim] for shape in shapes) == whole[dim], "each row of the weight is on one rank"
    assert_parity(module, inputs, program)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", sorted(GROUPED))
def test_groups_stay_with_their_channels(name: str, tp: int) -> None:
    module, inputs, program = lowered(GROUPED[name], tp, {"first": "column"})
    assert rule_of(program) == "group", program.source.notes
    assert_parity(module, inputs, program)


@pytest.mark.parametrize("rule", ["column", "row", "scatter"])
def test_more_ranks_than_channels(rule: str) -> None:
    """The last ranks have nothing of a layer with six or seven channels."""
    module, inputs, program = lowered(MADE["conv2d, reflect"], 8, {"first": "column", "layer": rule})
    held = [{t.name: t.shape for t in program.stage(0, rank).tensors}["layer.weight"] for rank in range(8)]
    assert 0 in held[-1] and 0 not in held[0]
    assert_parity(module, inputs, program)


def test_a_layer_of_one_channel_names_the_reason() -> None:
    with pytest.raises(PlanError, match="one channel"):
        lowered((lambda: nn.Linear(WIDTH, 1), ()), 2, {"first": "column", "layer": "column"})
