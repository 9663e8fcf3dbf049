"""Norms, attention, embeddings, random masks, computed weights: sharded as the table says, equal to one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from snnpart import facts, ops, simulate
from snnpart.errors import PlanError
from snnpart.facts import Placement, Sharded, Value
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from tests.lowering import assert_parity, compiled, fire

Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Layers by name, and how they are used."""

    def __init__(self, forward: Forward, **layers: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def _image(channels: int, forward: Forward, **layers: Any) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    net = Net(forward, conv=nn.Conv2d(2, channels, 3, padding=1), **layers)
    return net.double(), (torch.randn(4, 2, 6, 6, dtype=torch.float64),), "conv"


def _tokens(width: int, forward: Forward, **layers: Any) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    net = Net(forward, proj=nn.Linear(6, width), **layers)
    return net.double(), (torch.randn(4, 5, 6, dtype=torch.float64),), "proj"


def _heads(y: Tensor, heads: int) -> Tensor:
    return y.reshape(y.shape[0], 5, heads, -1).transpose(1, 2)


def _fused(m: Any, x: Tensor) -> Tensor:
    qkv = m.proj(x).reshape(x.shape[0], 5, 3, 6, 2).permute(2, 0, 3, 1, 4)
    q, k, v = qkv[0], qkv[1], qkv[2]
    return m.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(x.shape[0], 5, 12))


def _spiking(m: Any, x: Tensor) -> Tensor:
    """Spiking attention without softmax, q, k and v from one convolution."""
    q, k, v = (fire(y.flatten(2).reshape(x.shape[0], 6, 2, 36)) for y in m.norm(m.conv(x)).chunk(3, 1))
    return m.out((v @ (k.transpose(2, 3) @ q) * 0.1).reshape(x.shape[0], 12, 6, 6))


def _random(norm: nn.Module) -> nn.Module:
    """A norm whose scale and shift are not 1 and 0."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


FOLLOW: Mapping[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...], str]]] = {
    "group norm": lambda: _image(12, lambda m, x: m.norm(m.conv(x)), norm=nn.GroupNorm(6, 12)),
    "instance norm": lambda: _image(7, lambda m, x: m.norm(m.conv(x)), norm=nn.InstanceNorm2d(7, affine=True)),
    "layer norm of rows": lambda: _image(7, lambda m, x: m.norm(m.conv(x)), norm=nn.LayerNorm(6)),
    "rms norm of rows": lambda: _image(7, lambda m, x: m.norm(m.conv(x)), norm=nn.RMSNorm((6, 6))),
    "layer norm of features": lambda: _tokens(7, lambda m, x: m.n(m.proj(x)) ** 2, n=_random(nn.LayerNorm(7))),
    "layer norm without scale": lambda: _tokens(
        7, lambda m, x: m.n(m.proj(x)) ** 2, n=nn.LayerNorm(7, eps=0.1, elementwise_affine=False)
    ),
    "layer norm of images": lambda: _image(7, lambda m, x: m.n(m.conv(x)) ** 2, n=_random(nn.LayerNorm((7, 6, 6)))),
    "rms norm of features": lambda: _tokens(7, lambda m, x: m.n(m.proj(x)) ** 3, n=_random(nn.RMSNorm(7))),
    "rms norm with eps": lambda: _image(7, lambda m, x: m.n(m.conv(x)) ** 3, n=_random(nn.RMSNorm((7, 6, 6), eps=0.1))),
    "group norm of one group": lambda: _image(7, lambda m, x: m.n(m.conv(x)) ** 2, n=_random(nn.GroupNorm(1, 7))),
    "group norm without pixels": lambda: _tokens(
        9, lambda m, x: m.n(m.proj(x).flatten(0, 1)) ** 2, n=_random(nn.GroupNorm(1, 9))
    ),
    "roll": lambda: _image(7, lambda m, x: torch.roll(m.conv(x), 1, 2) * m.conv(x)),
    "topk": lambda: _image(7, lambda m, x: m.conv(x).flatten(2).topk(3, -1)[0] ** 2),
    "sort": lambda: _image(7, lambda m, x: m.conv(x).sort(2)[0] ** 2),
    "repeat interleave": lambda: _image(7, lambda m, x: m.conv(x).repeat_interleave(2, 2) ** 2),
    "tile": lambda: _image(7, lambda m, x: m.conv(x).tile(1, 1, 2, 1) ** 2),
    "deviation": lambda: _image(7, lambda m, x: m.conv(x).std((2, 3))),
    "variance": lambda: _image(7, lambda m, x: m.conv(x).var((2, 3), keepdim=True)),
    "length": lambda: _image(7, lambda m, x: m.conv(x).norm(dim=(2, 3))),
    "diff": lambda: _image(7, lambda m, x: torch.diff(m.conv(x), dim=2) ** 2),
    "triangle": lambda: _image(7, lambda m, x: torch.tril(m.conv(x)) ** 2),
    "glu": lambda: _image(12, lambda m, x: F.glu(m.conv(x), 1)),
    "glu of rows": lambda: _image(7, lambda m, x: F.glu(m.conv(x), 2)),
    "unfold": lambda: _image(7, lambda m, x: F.unfold(m.conv(x), 2) ** 2),
    "grid sample": lambda: _image(
        7, lambda m, x: F.grid_sample(m.conv(x), x[:, :, :3, :2].permute(0, 2, 3, 1).tanh(), align_corners=False)
    ),
    "unpool": lambda: _image(
        7, lambda m, x: F.max_unpool2d(*F.max_pool2d(m.conv(x), 2, return_indices=True), 2) ** 2
    ),
    "einsum with dots": lambda: _tokens(
        6, lambda m, x: torch.einsum("...c,dc->...d", m.proj(x), m.w), w=nn.Parameter(torch.randn(3, 6))
    ),
    "einsum of heads with dots": lambda: _tokens(
        12, lambda m, x: torch.einsum("...td,...sd->...ts", _heads(m.proj(x), 3), _heads(m.proj(x), 3).tanh())
    ),
    "einsum without a result": lambda: _tokens(
        6, lambda m, x: torch.einsum("btc,cd", m.proj(x), m.w), w=nn.Parameter(torch.randn(6, 3))
    ),
    "normalize": lambda: _image(7, lambda m, x: F.normalize(m.conv(x), dim=2)),
    "prelu": lambda: _image(7, lambda m, x: m.slope(m.conv(x)), slope=nn.PReLU(7)),
    "pixel shuffle": lambda: _image(16, lambda m, x: F.pixel_shuffle(m.conv(x), 2) ** 2),
    "pixel unshuffle": lambda: _image(7, lambda m, x: F.pixel_unshuffle(m.conv(x), 2) ** 2),
    "upsample": lambda: _image(7, lambda m, x: m.up(m.conv(x)) ** 2, up=nn.Upsample(scale_factor=2, mode="bilinear")),
    "chunk": lambda: _image(12, lambda m, x: torch.mul(*m.conv(x).chunk(2, 1))),
    "split": lambda: _image(12, lambda m, x: torch.mul(*m.conv(x).split([6, 6], 1))),
    "groups over uneven ranks": lambda: _image(
        8, lambda m, x: m.depth(m.conv(x)), depth=nn.Conv2d(8, 12, 3, padding=1, groups=4)
    ),
    "spiking attention, fused": lambda: _image(
        36, _spiking, norm=nn.BatchNorm2d(36), out=nn.Conv2d(12, 4, 1)
    ),
    "attention, fused": lambda: _tokens(36, _fused, out=nn.Linear(12, 6)),
    "attention, torch": lambda: _tokens(
        12, lambda m, x: F.scaled_dot_product_attention(*(_heads(m.proj(x), 4) * s for s in (1, 2, 3)))
    ),
    "attention, a layer of torch": lambda: _tokens(
        12, lambda m, x: m.out(m.a(*(m.proj(x),) * 3, need_weights=False)[0]),
        a=nn.MultiheadAttention(12, 6, batch_first=True), out=nn.Linear(12, 6),
    ),
    "heads of a head size": lambda: _tokens(20, lambda m, x: _heads(m.proj(x), 4).softmax(-1)),
    "einsum of heads": lambda: _tokens(
        12, lambda m, x: torch.einsum("bhtd,bhsd->bhts", _heads(m.proj(x), 3), _heads(m.proj(x), 3).tanh())
    ),
    "einsum with a table": lambda: _tokens(
        6, lambda m, x: torch.einsum("btc,tc->btc", m.proj(x), m.table), table=nn.Parameter(torch.randn(5, 6))
    ),
    "row product": lambda: _tokens(6, lambda m, x: m.proj(x) @ m.w, w=nn.Parameter(torch.randn(6, 3))),
    "row einsum": lambda: _tokens(
        6, lambda m, x: torch.einsum("btc,dc->btd", m.proj(x), m.w), w=nn.Parameter(torch.randn(3, 6))
    ),
}  # fmt: skip


def _placed(program: CompiledProgram, name: str) -> Placement:
    return facts.need(next(n for n in program.source.graph.nodes if n.name == name), Placement)


def _notes(program: CompiledProgram) -> dict[str, str]:
    return {key: text for key, text in program.source.notes.items() if key.startswith("replicated")}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", sorted(FOLLOW))
def test_it_is_sharded_and_equal(name: str, tp: int) -> None:
    torch.manual_seed(0)
    module, inputs, path = FOLLOW[name]()
    program = compiled(module, inputs, tp=tp, pinned=Plan(tp=tp, shards={path: "column"}), out_dims=0)
    assert program.plan.shards[path] == "column"
    assert not _notes(program), program.source.notes
    assert_parity(module, inputs, program)


DECLINE: Mapping[str, tuple[Callable[[], tuple[nn.Module, tuple[Tensor, ...], str]], str]] = {
    "layer norm of spikes": (
        lambda: _tokens(8, lambda m, x: m.n(fire(m.proj(x))), n=nn.LayerNorm(8)), "its input travels as bits"
    ),
    "normalize": (lambda: _image(8, lambda m, x: F.normalize(m.conv(x))), "normalises over the sharded dim"),
    "einsum": (lambda: _tokens(8, lambda m, x: torch.einsum("btc->bt", m.proj(x))), "sums over the sharded dim"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(DECLINE))
def test_it_declines_with_a_reason(name: str) -> None:
    build, reason = DECLINE[name]
    module, inputs, path = build()
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={path: "column"}), out_dims=0)
    assert any(reason in text for text in _notes(program).values()), program.source.notes
    assert_parity(module, inputs, program)


@pytest.mark.parametrize("name", ["layer norm of features", "rms norm of features", "group norm of one group"])
def test_a_norm_over_the_sharded_dim_sends_its_statistics_only(name: str) -> None:
    module, inputs, path = FOLLOW[name]()
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={path: "column", "n": "statistics"}), out_dims=0)
    sent = [n for n in program.stage(0, 0).graph.nodes if n.target is ops.all_gather]
    assert program.plan.shards["n"] == "statistics"
    statistics, result = (facts.need(node, Value) for node in sent)
    assert statistics.numel < result.numel


@pytest.mark.parametrize("name", ["layer norm of features", "rms norm of features", "group norm of one group"])
def test_statistics_of_half_numbers_are_taken_in_float32(name: str) -> None:
    """As torch's own norms take them: far from zero, bfloat16 sums would be off by much more than its rounding."""
    module, inputs, path = FOLLOW[name]()
    module, x = module.bfloat16(), inputs[0].bfloat16()
    module.get_submodule(path).bias.data += 8
    program = compiled(module, (x,), tp=2, pinned=Plan(tp=2, shards={path: "column", "n": "statistics"}), out_dims=0)
    found, whole = simulate.run(program, (x,), training=True).outputs[0], module(x)
    assert found.dtype is torch.bfloat16
    assert float((found - whole).abs().max() / whole.abs().max()) < 0.02


class Tied(nn.Module):
    """A language model with the embedding as its head (case A25): [N, 6] tokens of 7 -> [N, 6, 7]."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb, self.l = nn.Embedding(7, 5, **options), nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        return self.head(fire(self.l(x)) + x)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_vocabulary_is_dealt_out(tp: int) -> None:
    """Case A25 by rows: every rank looks up its tokens and computes its logits."""
    module, inputs = Tied().double(), (torch.arange(24).reshape(4, 6) % 7,)
    program = compiled(module, inputs, tp=tp, pinned=Plan(tp=tp, shards={"emb": "row"}))
    table = [t for t in program.stage(0, 0).tensors if t.name in ("emb.weight", "head.weight")]
    assert [(t.dim, t.shape) for t in table] == [(0, (7 // tp + (7 % tp > 0), 5))]
    assert_parity(module, inputs, program)


def test_a_row_that_learns_nothing_is_one_ranks() -> None:
    module, inputs = Tied(padding_idx=5).double(), (torch.arange(24).reshape(4, 6) % 7,)
    program = compiled(module, inputs, tp=3, pinned=Plan(tp=3, shards={"emb": "row"}))
    assert_parity(module, inputs, program)


def test_a_table_that_needs_all_ids_is_not_cut_by_rows() -> None:
    option = "scale_grad_by_freq"
    module, inputs = Tied(**{option: True}).double(), (torch.arange(24).reshape(4, 6) % 7,)
    with pytest.raises(PlanError, match=f"cannot be sharded by 'row': {option} needs all ids of a row"):
        compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"emb": "row"}))


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_tied_head_takes_the_slices_of_its_embedding(tp: int) -> None:
    """Case A25: both ends add to one gradient, held once."""
    module, inputs = Tied().double(), (torch.arange(24).reshape(4, 6) % 7,)
    program = compiled(module, inputs, tp=tp, pinned=Plan(tp=tp, shards={"emb": "column"}))
    table = [t for t in program.stage(0, 0).tensors if t.name in ("emb.weight", "head.weight")]
    assert [(t.dim, t.shape) for t in table] == [(1, (7, 5 // tp + (5 % tp > 0)))]
    assert_parity(module, inputs, program)


def test_weights_behind_a_parametrization_are_cut_too() -> None:
    module = nn.Sequential(weight_norm(nn.Conv2d(2, 7, 3)), nn.ReLU(), nn.Conv2d(7, 3, 1)).double()
    inputs = (torch.randn(4, 2, 6, 6, dtype=torch.float64),)
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"0": "column", "2": "row"}))
    cut = {t.name: t.shape for t in program.stage(0, 1).tensors if t.dim is not None}
    assert sorted(shape[0] for name, shape in cut.items() if name.startswith("0.")) == [3, 3, 3], cut
    assert_parity(module, inputs, program)


def test_a_standardised_weight_is_cut_where_it_is_read() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.conv.weight
        return F.conv2d(x, (w - w.mean((1, 2, 3), keepdim=True)) * m.gain, m.conv.bias)

    module = Net(forward, conv=nn.Conv2d(2, 7, 3), gain=nn.Parameter(torch.tensor(0.7))).double()
    inputs = (torch.randn(4, 2, 6, 6, dtype=torch.float64),)
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"conv": "column"}))
    shapes = {t.name: t.shape for t in program.stage(0, 1).tensors}
    assert shapes["conv.weight"] == (3, 2, 3, 3) and shapes["gain"] == ()
    assert_parity(module, inputs, program)


DROPS: Mapping[str, Forward] = {
    "dropout": lambda m, x: F.dropout(m.proj(x), 0.5),
    "module": lambda m, x: m.drop(m.proj(x)),
    "mask by hand": lambda m, x: m.proj(x) * F.dropout(torch.ones_like(m.proj(x)), 0.5),
    "noise": lambda m, x: m.proj(x) + torch.randn_like(m.proj(x)),
    "channels": lambda m, x: F.dropout1d(m.proj(x).transpose(1, 2), 0.5),
}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", sorted(DROPS))
def test_masks_are_those_of_one_process(name: str, tp: int) -> None:
    """Case A15: from one seed the mask is bit-equal for every tp, whether the value is sharded or whole."""
    module = Net(DROPS[name], proj=nn.Linear(6, 7), drop=nn.Dropout(0.4)).double()
    inputs = (torch.randn(4, 5, 6, dtype=torch.float64),)
    for rule in ("column", "replicate"):
        program = compiled(module, inputs, tp=tp, pinned=Plan(tp=tp, shards={"proj": rule}))
        drawn = [n for n in program.stage(0, 0).graph.nodes if n.target is ops.drawn_slice]
        assert bool(drawn) == (rule == "column"), program.source.notes
        torch.manual_seed(5)
        want = module(*inputs)
        torch.manual_seed(5)
        got = simulate.run(program, inputs, training=True).outputs[0]
        assert float((want - got).detach().abs().max()) < 1e-12
        assert sorted(set((want == 0).flatten().tolist())) == ([False] if name == "noise" else [False, True])


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("mode", ["m", "s"])
@pytest.mark.parametrize("kind", ["Dropout", "Dropout2d"])
def test_a_framework_s_mask_over_time_is_dealt_out(kind: str, mode: str, tp: int) -> None:
    """SpikingJelly keeps one mask for the window: every rank has its channels of it, at all steps the same."""
    layer = pytest.importorskip("spikingjelly.activation_based.layer")
    from spikingjelly.activation_based import functional, neuron

    layers = [layer.Conv2d(2, 5, 3), neuron.IFNode(v_threshold=0.1), getattr(layer, kind)(0.4), layer.Conv2d(5, 3, 1)]
    net = nn.Sequential(*layers).double()
    functional.set_step_mode(net, mode)
    module = net if mode == "m" else Net(lambda m, x: torch.stack([m.net(step) for step in x]), net=net)
    inputs = (torch.rand(4, 3, 2, 5, 5, dtype=torch.float64),)
    path = "" if mode == "m" else "net."
    rules = {f"{path}0": "column", f"{path}3": "row"}
    program = compiled(module, inputs, tp=tp, pinned=Plan(tp=tp, shards=rules), in_dims=1, time_dims=0)
    nodes = [n.target for n in program.stage(0, 0).graph.nodes]
    assert nodes.count(ops.drawn_slice) == 1 and ops.all_gather not in nodes and ops.shard not in nodes
    torch.manual_seed(5)
    want = module(*inputs)
    functional.reset_net(net)
    torch.manual_seed(5)
    got = simulate.run(program, inputs, training=True).outputs[0]
    assert float((want - got).detach().abs().max()) < 1e-12 and float(want.detach().std()) > 0.05


def test_a_neuron_layer_of_which_one_step_is_read_is_sharded() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    module = Net(lambda m, x: m.lif(m.proj(x))[-1], proj=nn.Linear(6, 7), lif=neuron.LIFNode(step_mode="m")).double()
    inputs = (torch.rand(4, 3, 6, dtype=torch.float64) * 4,)
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"proj": "column"}), in_dims=1, time_dims=0)
    (lif,) = (node for node in program.source.graph.nodes if node.op == "call_module")
    assert facts.need(lif, Placement).rule == "shard", program.source.notes
    assert_parity(module, inputs, program, in_dim=1)


def test_a_recurrent_neuron_stays_whole_with_the_reason() -> None:
    snntorch = pytest.importorskip("snntorch")

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward = nn.Linear(6, 7)
            self.neuron = snntorch.RLeaky(beta=0.8, linear_features=7, init_hidden=False)

        def forward(self, x: Tensor) -> Tensor:
            spikes, membrane = self.neuron.init_rleaky()
            for _ in range(3):
                spikes, membrane = self.neuron(self.inward(x), spikes, membrane)
            return membrane

    module, inputs = Recurrent(), (torch.randn(4, 6),)
    program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"inward": "column"}))
    said = program.source.notes["replicated neuron"]
    assert re.search(r"linear_\d+ inside it needs all channels at every step", said), said
    torch.testing.assert_close(simulate.run(program, inputs, training=True).outputs[0], module(*inputs))


def test_spiking_norms_of_a_framework_are_cut_with_the_channels() -> None:
    layers = pytest.importorskip("spikingjelly.activation_based.layer")
    norms = [
        layers.BatchNorm2d(7, step_mode="m"),
        layers.SeqToANNContainer(nn.BatchNorm2d(7)),
        layers.ThresholdDependentBatchNorm2d(alpha=1.0, v_th=0.5, num_features=7),
        layers.TemporalEffectiveBatchNorm2d(T=3, num_features=7),
    ]
    for norm in norms:
        norm.step_mode = "m"
        module = nn.Sequential(layers.Conv2d(2, 7, 3, step_mode="m"), norm).double()
        inputs = (torch.randn(3, 4, 2, 6, 6, dtype=torch.float64),)
        options = {"in_dims": 1, "time_dims": 0}
        program = compiled(module, inputs, tp=2, pinned=Plan(tp=2, shards={"0": "column"}), **options)
        held = [t for t in program.stage(0, 1).tensors if t.name.startswith("1.") and t.global_shape == (7,)]
        assert held and all(t.shape == (3,) for t in held), type(norm).__name__
        assert_parity(module, inputs, program, in_dim=1)
        assert isinstance(
            _placed(program, program.source.graph.find_nodes(op="call_function", target=torch.conv2d)[0].name).output,
            Sharded,
        )
