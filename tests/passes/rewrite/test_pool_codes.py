"""pool-codes: max poolings where channels lie last keep a byte a window, and every gradient is what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import layer, neuron, surrogate
from torch import Tensor, nn

import snnpart
from snnpart import ops_pool, text
from snnpart.compilation import Options, compile_program
from snnpart.passes.lower import kernels
from snnpart.program import CompiledProgram


class Pooled(nn.Module):
    """[T, N, 3, 8, 8] -> [T, N, 5]: two convolutional layers of spikes with a pooling behind each."""

    def __init__(self, pool: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        lif = lambda: neuron.LIFNode(step_mode="m", v_threshold=0.4, surrogate_function=surrogate.ATan())
        self.conv1, self.n1 = layer.Conv2d(3, 6, 3, padding=1, step_mode="m"), lif()
        self.conv2, self.n2 = layer.Conv2d(6, 6, 3, padding=1, step_mode="m"), lif()
        self.pool, self.fc = pool or (lambda x: F.max_pool2d(x, 3, 2, 1)), nn.Linear(6, 5)
        with torch.no_grad():
            for conv in (self.conv1, self.conv2):
                conv.weight.mul_(2.0)
                conv.bias.add_(0.3)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.n1(self.conv1(x)).flatten(0, 1)).unflatten(0, x.shape[:2])
        x = self.n2(self.conv2(x)).flatten(0, 1)
        found: Tensor = self.fc(F.max_pool2d(x, 2).mean((2, 3))).unflatten(0, (4, -1))
        return found


def example() -> Tensor:
    return torch.rand((4, 2, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2


def made(pool: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    torch.manual_seed(0)
    return Pooled(pool).double()


def compiled(pool: Callable[[Tensor], Tensor] | None = None, **options: Any) -> CompiledProgram:
    given: dict[str, Any] = {"input_layout": "TNCHW", "channels_last": True, "verify": "off", **options}
    return compile_program(made(pool), example(), Options(**given))[0]


def by_codes(program: CompiledProgram) -> list[str]:
    nodes = (node for stage in program.stages.values() for node in stage.graph.nodes)
    return [node.name for node in nodes if node.target is ops_pool.max_pool2d]


def test_poolings_of_images_with_channels_last_keep_codes() -> None:
    assert by_codes(compiled()) == ["max_pool2d", "max_pool2d_1"]
    assert by_codes(compiled(channels_last=False)) == []


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2),
        lambda x: F.max_pool2d(x, 9, 2, 4),
        lambda x: F.max_pool2d(F.pad(x, (0, 10, 0, 10)), 1, (13, 5)),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.adaptive_max_pool2d(x, 4),
    ],
    ids=["dilated", "large", "far apart", "places asked for", "average", "adaptive"],
)
def test_what_stays_torch_s(pool: Callable[[Tensor], Tensor]) -> None:
    """Only the pooling behind it keeps codes."""
    assert len(by_codes(compiled(pool))) == 1


def test_a_program_with_codes_is_text_that_parses_back() -> None:
    written = text.print_fx(compiled().stages[0, 0].graph)
    assert " = snnpart.ops_pool.max_pool2d(" in written
    assert text.print_fx(text.parse_fx(written)) == written


def test_the_footprint_counts_a_byte_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of eight and of the input, which the neuron before keeps for nobody else."""
    codes = compiled().stages[0, 0].footprint.saved
    monkeypatch.setattr(kernels, "pool_codes", lambda graph: None)
    plain = compiled().stages[0, 0].footprint.saved
    windows = 4 * 2 * 6 * (4 * 4 + 2 * 2)
    spikes = 4 * 2 * 6 * (8 * 8 + 4 * 4)
    assert plain - codes == 7 * windows + 8 * spikes


@pytest.mark.parametrize(
    "options",
    [{}, {"tp": 2}, {"pp": 2}, {"fuse": True, "saved": "packed"}, {"pp": 2, "schedule": "zbv", "microbatches": 2}],
    ids=str,
)
def test_gradients_are_the_module_s(options: dict[str, Any]) -> None:
    """The gate compares outputs and gradients of all ranks with the module's, in float64."""
    given = Options(input_layout="TNCHW", channels_last=True, **options)
    program, report = compile_program(made(), example(), given)
    assert by_codes(program) and report is not None and report.unverified == {}


@pytest.mark.parametrize("execution", ["eager", pytest.param("compile", marks=pytest.mark.all)])
def test_a_train_step_is_that_of_the_plain_program(execution: str) -> None:
    y = torch.tensor([1, 3])
    loss = lambda out, wanted: F.cross_entropy(out.mean(0), wanted)
    steps = []
    for last in (False, True):
        program = snnpart.parallelize(
            made(), example_inputs=example(), input_layout="TNCHW", channels_last=last, verify="off"
        )
        with program.launch(lambda p: torch.optim.SGD(p, lr=0.1), execution=execution) as running:  # type: ignore[union-attr]
            steps.append((float(running.train_step(example(), y, loss)), running.state_dict()))
    (loss_of_plain, plain), (loss_of_codes, state) = steps
    assert loss_of_codes == pytest.approx(loss_of_plain, rel=1e-12)
    for name, value in plain.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
