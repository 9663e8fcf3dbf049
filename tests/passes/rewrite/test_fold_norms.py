"""fold-norms: which norms become part of the layer before them in eval, which stay and why; nothing changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn

import snnpart
from snnpart import artifact, ops, ops_fold, simulate
from snnpart.compilation import Options, compile_program
from snnpart.errors import ConfigError
from snnpart.fingerprint import fingerprint
from snnpart.ops_fused import NORMS
from snnpart.program import CompiledProgram
from tests.nets import Spike


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A network in float64 whose norms have statistics, scales and shifts of their own."""
    torch.manual_seed(0)
    model = make().double()
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
            assert part.running_var is not None
            part.running_mean.uniform_(-0.3, 0.3)
            part.running_var.uniform_(0.3, 1.5)
            if part.affine:
                nn.init.uniform_(part.weight, 0.7, 1.9)
                nn.init.uniform_(part.bias, 0.1, 0.5)
    return model


def compiled(model: nn.Module, x: Tensor, **options: Any) -> CompiledProgram:
    given: dict[str, Any] = {"input_layout": "TNCHW", "verify": "off", "numerics": "fold", **options}
    return compile_program(model, x, Options(**given))[0]


def norms_in(graph: Any) -> int:
    return sum(node.target in NORMS for node in graph.nodes)


def evaluated(program: CompiledProgram, x: Tensor) -> Tensor:
    """What the graphs of evaluations give, all ranks in this process."""
    stages = {at: replace(p, graph=p.evaluation or p.graph) for at, p in program.stages.items()}
    return simulate.run(replace(program, stages=stages), [x], training=False).outputs[0].detach()


class Fire(nn.Module):
    """A hand-written neuron without memory."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        spikes: Tensor = Spike.apply(x - self.threshold)
        return spikes


def module_s(model: nn.Module, x: Tensor) -> Tensor:
    """What the module gives in eval; each of its neuron layers fires."""
    rates: list[float] = []
    neurons = [part for part in model.modules() if isinstance(part, (Fire, neuron.LIFNode))]
    hooks = [part.register_forward_hook(lambda _, __, out: rates.append(float(out.mean()))) for part in neurons]
    with torch.no_grad():
        found: Tensor = model.eval()(x)
    for hook in hooks:
        hook.remove()
    functional.reset_net(model)
    model.train()
    assert rates and all(0.01 < rate < 0.99 for rate in rates)
    return found


class Hand(nn.Module):
    """[T, N, C, H, W]: every kind of layer in front of a norm, a hand-written neuron behind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.up, self.upnorm = nn.ConvTranspose2d(6, 8, 2, stride=2, groups=2), nn.BatchNorm2d(8)
        self.deep, self.deepnorm = nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8, affine=False)
        self.fc, self.fcnorm = nn.Linear(8, 5), nn.BatchNorm1d(5)
        self.token, self.tokennorm = nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6)
        self.first, self.second, self.third = Fire(0.3), Fire(0.0), Fire(0.2)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[0]
        y = self.norm(self.conv(x.flatten(0, 1)))
        y = self.upnorm(self.up(self.first(y)))
        y = self.second(self.deepnorm(self.deep(y)))
        y = self.third(self.fcnorm(self.fc(y.flatten(2).mean(2))))
        y = y.unflatten(0, (steps, -1))
        tokens: Tensor = self.tokennorm(self.token(y).transpose(1, 2))
        return tokens


class Looped(nn.Module):
    """One layer a step, its norm called T times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fire = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), Fire(1.0)

    def forward(self, x: Tensor) -> Tensor:
        v, made = torch.zeros(()), []
        for t in range(x.shape[0]):
            v = v * 0.5 + self.norm(self.conv(x[t]))
            spikes = self.fire(v)
            v = v - spikes
            made.append(spikes)
        return torch.stack(made)


def spiking() -> nn.Module:
    lif = lambda: neuron.LIFNode(step_mode="m", v_threshold=0.3, surrogate_function=surrogate.ATan())
    convs = (layer.Conv2d(4, 6, 3, padding=1, bias=False, step_mode="m"), layer.Conv2d(6, 8, 3, step_mode="m"))
    norms = (layer.BatchNorm2d(6, step_mode="m"), layer.BatchNorm2d(8, step_mode="m"))
    return nn.Sequential(convs[0], norms[0], lif(), convs[1], norms[1], lif())


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {"hand": (Hand, 5), "spikingjelly": (spiking, 2)}
TOPOLOGIES: list[dict[str, Any]] = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]


def batch(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand((3, 4, 4, 6, 6), generator=torch.Generator().manual_seed(1), dtype=dtype) * 2 - 0.2


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", NETS)
def test_folded_evaluations_are_the_module_s(
    name: str, topology: dict[str, Any], dtype: torch.dtype, limit: float
) -> None:
    """Channels and weights are shared so that every norm still has its layer right before it."""
    make, norms = NETS[name]
    model, x = seeded(make).to(dtype), batch(dtype)
    shard = {"conv": "column", "up": "group", "deep": "group", "fc": "column", "token": "column"}
    shard = shard if name == "hand" else {"0": "column", "3": "column"}
    cut = {"split_at": ["deep" if name == "hand" else "3"]} if "pp" in topology else {}
    program = compiled(model, x, shard=shard if "tp" in topology else "max", **topology, **cut)
    left = sum(norms_in(p.evaluation or p.graph) for (_, tp), p in program.stages.items() if tp == 0)
    assert (sum(norms_in(p.graph) for (_, tp), p in program.stages.items() if tp == 0), left) == (norms, 0)
    wanted = module_s(model, x)
    assert float((evaluated(program, x) - wanted).abs().max()) <= limit * float(wanted.abs().max())


def test_a_layer_called_at_every_step_is_scaled_once() -> None:
    model, x = seeded(Looped), batch()
    for options in ({"fold": True}, {"fold": False}):
        program = compiled(model, x, **options)
        (graph,) = (p.evaluation for p in program.stages.values())
        assert graph is not None and norms_in(graph) == 0
        assert sum(node.target is ops_fold.scaled_weight for node in graph.nodes) == 1
        wanted = module_s(model, x)
        assert torch.equal(evaluated(program, x), wanted)


def test_the_training_graph_stays_as_it_is() -> None:
    model, x = seeded(spiking), batch()
    folded, exact = compiled(model, x), compiled(model, x, numerics="exact")
    assert [str(p.graph) for p in folded.stages.values()] == [str(p.graph) for p in exact.stages.values()]
    assert all(p.evaluation is None for p in exact.stages.values())


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.flatten(0, 1))
        found: Tensor = self.norm(y) + y
        return found


class Untracked(TwoReaders):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.conv(x.flatten(0, 1)))
        return found


class Pooled(TwoReaders):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(torch.max_pool2d(self.conv(x.flatten(0, 1)), 2))
        return found


class OtherDim(TwoReaders):
    """The norm takes the tokens for channels, not the features that the layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Linear(6, 6)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.conv(x.flatten(0, 1)))
        return found


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (TwoReaders, "node %conv2d (module 'conv', test_fold_norms.py:1), which it reads, has other readers"),
        (Untracked, "it uses the batch's own statistics in eval"),
        (Pooled, "node %max_pool2d (test_fold_norms.py:1) before it is no convolution and no linear layer"),
        (
            OtherDim,
            "the channels of node %linear (module 'conv', test_fold_norms.py:1) are not those that it normalises",
        ),
    ],
)
def test_a_norm_that_stays_is_named_with_the_reason(make: Callable[[], nn.Module], reason: str) -> None:
    program = compiled(seeded(make), batch())
    assert all(p.evaluation is None for p in program.stages.values())
    stays, none = program.notices
    assert "(module 'norm'" in stays
    plain = re.sub(r"[^ (]*/(?=\w+\.py)|(?<=\.py:)\d+", lambda found: "1" if found[0].isdigit() else "", stays)
    assert plain.endswith(f"is not folded in eval: {reason}")
    assert none == "0 norms are part of the layer before them in eval: none"


def test_a_norm_behind_a_sum_over_ranks_stays() -> None:
    program = compiled(seeded(spiking), batch(), tp=2, shard={"0": "column", "3": "row"})
    assert [norms_in(p.evaluation) for p in program.stages.values()] == [1, 1]
    assert sum("the sum over tp ranks stands between it and its layer" in notice for notice in program.notices) == 1
    assert torch.equal(evaluated(program, batch()), module_s(seeded(spiking), batch()))


def test_a_norm_in_another_stage_than_its_layer_stays() -> None:
    program = compiled(seeded(spiking), batch(), pp=2, split_at=["4"])
    assert [norms_in(p.evaluation or p.graph) for p in program.stages.values()] == [0, 1]
    assert sum("it reads an input of its stage" in notice for notice in program.notices) == 1


def test_a_norm_in_a_neuron_s_kernel_stays_there() -> None:
    program = compiled(seeded(spiking), batch(), fuse=True)
    assert sum("it is part of the neuron's kernel" in notice for notice in program.notices) == 2
    assert all(p.evaluation is None for p in program.stages.values())


def test_a_launched_program_folds_what_it_has_learned() -> None:
    """Evaluations follow the live weights and statistics; a train step is the one of an exact program."""
    x, y = batch(), torch.randint(0, 2, (3, 4, 8, 4, 4), generator=torch.Generator().manual_seed(2)).double()
    runs = []
    for numerics in ("exact", "fold"):
        program = snnpart.parallelize(
            seeded(spiking), example_inputs=x, input_layout="TNCHW", numerics=numerics, verify="trace"
        )
        mse = lambda out, wanted: (out - wanted).square().mean()
        with program.launch(lambda params: torch.optim.SGD(params, lr=0.5), target_dim=1) as running:  # type: ignore[union-attr]
            losses = [float(running.train_step(x, y, mse)) for _ in range(3)]
            runs.append((losses, running.eval_step(x), running.state_dict()))
    (losses, wanted, state), (own, found, learned) = runs
    assert losses == own and len(set(losses)) == 3
    assert all(torch.equal(state[name], learned[name]) for name in state)
    assert 0.01 < float(wanted.mean()) < 0.99
    assert torch.equal(found, wanted)


def test_a_saved_program_keeps_the_graph_of_its_evaluations(tmp_path: Path) -> None:
    program = compiled(seeded(spiking), batch())
    artifact.save(program, tmp_path / "saved")
    read = artifact.load(tmp_path / "saved")
    exact = compiled(seeded(spiking), batch(), numerics="exact")
    assert fingerprint(read) == fingerprint(program) != fingerprint(exact)
    assert read.plan.numerics == "fold"
    assert torch.equal(evaluated(read, batch()), evaluated(program, batch()))


def test_numerics_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="numerics='fast' is not known"):
        Options(numerics="fast")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_half_tensors_are_computed_in_float32(dtype: torch.dtype) -> None:
    weight, var, mean = torch.rand(3, 2).to(dtype), torch.rand(3).to(dtype), torch.rand(3).to(dtype)
    found = ops_fold.scaled_weight(weight, None, var, 1e-5, 0, 1)
    wanted = (weight.float() * torch.rsqrt(var.float() + 1e-5).unsqueeze(1)).to(dtype)
    assert found.dtype is dtype and torch.equal(found, wanted)
    assert ops_fold.shifted_bias(None, None, None, mean, var, 1e-5).dtype is dtype
    assert ops.batch_norm in NORMS
