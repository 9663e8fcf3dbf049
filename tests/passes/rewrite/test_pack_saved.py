"""saved="packed": what layers keep for backward is bits, and every gradient is what it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import layer, neuron, surrogate
from torch import Tensor, nn

import snnpart
from snnpart import text
from snnpart.bits import States, packed_bytes
from snnpart.compilation import Options, compile_program
from snnpart.errors import ConfigError
from snnpart.ops_packed import PackedInput
from snnpart.program import CompiledProgram


class Residual(nn.Module):
    """[T, N, 3, H, W]: spikes, a sum of two layers' spikes, and a linear layer at the end."""

    def __init__(self) -> None:
        super().__init__()
        lif = lambda: neuron.LIFNode(step_mode="m", v_threshold=0.4, surrogate_function=surrogate.ATan())
        self.conv1, self.n1 = layer.Conv2d(3, 6, 3, padding=1, step_mode="m"), lif()
        self.conv2, self.n2 = layer.Conv2d(6, 6, 3, padding=1, step_mode="m"), lif()
        self.conv3, self.n3 = layer.Conv2d(6, 4, 3, padding=1, step_mode="m"), lif()
        self.fc = nn.Linear(4 * 16, 5)
        with torch.no_grad():
            for conv in (self.conv1, self.conv2, self.conv3):
                conv.weight.mul_(2.0)
                conv.bias.add_(0.3)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.n1(self.conv1(x))
        spikes = self.n2(self.conv2(spikes)) + spikes
        spikes = self.n3(self.conv3(spikes))
        found: Tensor = self.fc(spikes.flatten(2))
        return found


def example() -> Tensor:
    return torch.rand((4, 2, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2


def made() -> nn.Module:
    torch.manual_seed(0)
    return Residual().double()


def compiled(**options: Any) -> CompiledProgram:
    given: dict[str, Any] = {"input_layout": "TNCHW", "saved": "packed", "verify": "off", **options}
    return compile_program(made(), example(), Options(**given))[0]


def packed(program: CompiledProgram) -> dict[str, States]:
    """The states of each layer's input, by the name of the layer's node."""
    nodes = (node for stage in program.stages.values() for node in stage.graph.nodes)
    return {node.name: node.target.states for node in nodes if isinstance(node.target, PackedInput)}


def test_layers_that_read_few_whole_numbers_keep_bits() -> None:
    """The image is real; spikes have two states, the sum of two of them three."""
    assert packed(compiled()) == {"conv2d_1": (0, 2), "conv2d_2": (0, 3), "linear": (0, 2)}
    assert packed(compiled(saved="plain")) == {}


def test_what_is_frozen_keeps_nothing() -> None:
    model = made()
    model.conv2.requires_grad_(False)  # type: ignore[union-attr]
    options = Options(input_layout="TNCHW", saved="packed", verify="off")
    assert set(packed(compile_program(model, example(), options)[0])) == {"conv2d_2", "linear"}


def test_a_program_with_packed_inputs_is_text_that_parses_back() -> None:
    written = text.print_fx(compiled().stages[0, 0].graph)
    assert " = packed 0 3 torch.conv2d(" in written
    assert text.print_fx(text.parse_fx(written)) == written


@pytest.mark.parametrize(
    "options",
    [{}, {"tp": 2}, {"pp": 2}, {"fuse": True, "channels_last": True}, {"pp": 2, "tp": 2, "microbatches": 2}],
    ids=str,
)
def test_gradients_are_the_module_s(options: dict[str, Any]) -> None:
    """The gate compares outputs and gradients of all ranks with the module's, in float64."""
    given = Options(input_layout="TNCHW", saved="packed", **options)
    program, report = compile_program(made(), example(), given)
    assert packed(program) and report is not None and report.unverified == {}


def test_a_train_step_is_that_of_the_plain_program() -> None:
    y = torch.tensor([1, 3])
    loss = lambda out, wanted: F.cross_entropy(out.mean(0), wanted)
    steps = []
    for saved in ("plain", "packed"):
        program = snnpart.parallelize(made(), example_inputs=example(), input_layout="TNCHW", saved=saved)
        with program.launch(lambda params: torch.optim.SGD(params, lr=0.1)) as running:  # type: ignore[union-attr]
            steps.append((float(running.train_step(example(), y, loss)), running.state_dict()))
    (loss_of_plain, plain), (loss_of_packed, state) = steps
    assert loss_of_plain == loss_of_packed
    assert all(torch.equal(plain[name], state[name]) for name in plain)


def test_the_footprint_counts_bits() -> None:
    plain, bits = (compiled(saved=saved).stages[0, 0].footprint.saved for saved in ("plain", "packed"))
    numel = 4 * 2 * 6 * 16
    spikes = {"n1": (numel, 2), "sum": (numel, 3), "n3": (4 * 2 * 4 * 16, 2)}
    gone = sum(8 * elements - packed_bytes(elements, states) for elements, states in spikes.values())
    assert plain - bits == gone


def test_the_footprint_of_fused_neurons_counts_what_they_keep() -> None:
    """Each convolution's output and each layer's input once; the image is the caller's."""
    large, small = 4 * 2 * 6 * 16, 4 * 2 * 4 * 16
    outputs, inputs = 2 * large + small, 2 * large + small
    assert compiled(saved="plain", fuse=True).stages[0, 0].footprint.saved == 8 * (outputs + inputs)


CONVOLUTION: Callable[..., Tensor] = torch.conv2d


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "a view"])
@pytest.mark.parametrize("states", [(0, 2), (-1, 3), (0, 7)], ids=str)
def test_one_operation(states: States, layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    low, count = states
    x = torch.randint(low, low + count, (3, 5, 6, 4)).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels last" else x
    x = x.transpose(2, 3)[1:] if layout == "a view" else x
    weight = torch.randn(4, 5, 3, 3, dtype=dtype, requires_grad=True)
    runs = []
    for function in (CONVOLUTION, PackedInput(CONVOLUTION, states)):
        own = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = function(own, weight, None, (1, 1), (1, 1), (1, 1), 1)
        runs.append((y, *torch.autograd.grad((y * y).sum(), [own, weight])))
    assert all(torch.equal(wanted, found) for wanted, found in zip(*runs, strict=True))


@pytest.mark.parametrize("function", [CONVOLUTION, F.linear])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_input_is_free_after_forward(function: Callable[..., Tensor], autocast: bool) -> None:
    weight = torch.randn((4, 5, 1, 1) if function is CONVOLUTION else (4, 8), requires_grad=True)
    kept = {}
    for name, run in (("plain", function), ("packed", PackedInput(function, (0, 2)))):
        x = torch.ones(2, 5, 8, 8).requires_grad_().clone()
        storage = weakref.ref(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = run(x, weight)
        del x
        gc.collect()
        kept[name] = storage() is not None or _keeps(y, 2 * 5 * 8 * 8)
        y.sum().backward()
    assert kept["packed"] is False


def _keeps(y: Tensor, numel: int) -> bool:
    """Whether a node of the graph behind y holds a floating-point tensor of so many numbers."""
    seen, found, todo = set(), False, [y.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        raw = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved")]
        for item in raw:
            held = item.data if isinstance(getattr(item, "data", None), Tensor) else None
            found |= held is not None and held.numel() == numel and held.is_floating_point()
        todo += [parent for parent, _ in node.next_functions]
    return found


def test_without_gradients_nothing_is_packed() -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("packed")

    x, weight = torch.ones(2, 5, 8, 8), torch.randn(4, 5, 1, 1, requires_grad=True)
    call = PackedInput(CONVOLUTION, (0, 2), refuse, refuse)
    with torch.no_grad():
        assert torch.equal(call(x, weight), torch.conv2d(x, weight))
    assert not call(x[:0], weight).numel()


def test_what_saved_can_be() -> None:
    with pytest.raises(ConfigError, match="saved='bits' is not known"):
        Options(saved="bits")
