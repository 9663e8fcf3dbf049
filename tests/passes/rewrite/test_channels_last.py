"""channels-last: one conversion at each entry of a convolutional region, and no hidden ones."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from snnpart import facts, frameworks, ops, ops_layout
from snnpart.compilation import Options, compile_program
from snnpart.costs import MachineProfile
from snnpart.errors import ConfigError
from snnpart.facts import Cost, Value
from snnpart.graph import Body
from snnpart.passes.lower.kernels import copies_for
from snnpart.program import CompiledProgram
from tests.distributed.layout_nets import NETS, Heads, images, made
from tests.layouts import LayoutChanges


class Images(nn.Module):
    """[N, 3, 12, 12] -> [N, 4]: convolutions, norms, pooling, a skip connection, no neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = nn.functional.max_pool2d(self.second(y) + y, 2)
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


class Twice(Images):
    """Leaves the layout in between: channels are mixed by a linear layer over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = (y.flatten(2) @ torch.ones(144, 144, dtype=y.dtype)).unflatten(2, (12, 12))
        return self.head(self.second(y).mean((2, 3)))  # type: ignore[no-any-return]


class Sequences(nn.Module):
    """[N, 3, 12, 12] -> [N, 4]: image convolutions, whose places become a sequence for 1d ones, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.point, self.wide = nn.Conv1d(6, 6, 1), nn.Conv1d(6, 6, 3, padding="same", dilation=2)
        self.paired, self.head = nn.Conv1d(6, 8, 2, stride=2, groups=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x)).flatten(2)
        y = y + torch.relu(self.norm(self.point(y))) + self.wide(y)
        y = self.paired(y).unflatten(2, (6, 12))
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


class Mixed(Sequences):
    """A product over places gives a sequence that lies otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x)).flatten(2)
        y = y @ torch.ones(144, 144, dtype=y.dtype)
        return self.head(self.paired(self.point(y) + self.wide(y)).mean(2))  # type: ignore[no-any-return]


def compiled(model: nn.Module, **options: Any) -> CompiledProgram:
    given: dict[str, Any] = {"verify": "off", "channels_last": True, **options}
    return compile_program(model, torch.rand(2, 3, 12, 12), Options(**given))[0]


class ConvolutionInputs(TorchDispatchMode):
    """Notes the shape of what every convolution reads, and whether it lies with its channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.found.append((args[0].dim(), args[0].is_contiguous(memory_format=torch.channels_last)))
        return func(*args, **(kwargs or {}))


def conversions(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is ops_layout.channels_last]


def body_of(program: CompiledProgram) -> Body:
    stage = program.stages[0, 0]
    tensors = {
        part.name: program.source.tensors[part.name]
        .tensor.detach()
        .clone(memory_format=torch.channels_last if part.channels_last else torch.contiguous_format)
        for part in stage.tensors
    }
    own = {p.name: ("parameter" if p.requires_grad else p.kind, tensors[p.name]) for p in stage.tensors if not p.leaf}
    return Body(own, {path: frameworks.clone_leaf(i.module, {}) for path, i in stage.leaves.items()})


Watch = TypeVar("Watch", bound=TorchDispatchMode)


def run_watched(model: nn.Module, watch: Watch, entries: int) -> Watch:
    """Train forward once under the watch; the graph has as many conversions as there are entries."""
    program = compiled(model)
    graph = program.stages[0, 0].graph
    assert len(conversions(graph)) == entries
    body = body_of(program)
    body.training = True
    with watch:
        body.bind(graph)(torch.rand(2, 3, 12, 12))
    return watch


@pytest.mark.parametrize(("make", "entries"), [(Images, 1), (Twice, 2)])
def test_layouts_change_where_the_graph_says_and_nowhere_else(make: type[Images], entries: int) -> None:
    assert len(run_watched(make(), LayoutChanges(), entries).found) == entries


@pytest.mark.parametrize(("make", "entries"), [(Sequences, 1), (Mixed, 2)])
def test_sequences_lie_as_images_do(make: type[Sequences], entries: int) -> None:
    assert run_watched(make(), ConvolutionInputs(), entries).found == [(4, True)] * 4


def test_views_cost_nothing_and_conversions_what_a_copy_costs() -> None:
    """A convolution over sequences costs as one over images what it cost before."""
    profile = MachineProfile(name="toy", flops={"float32": 1e9}, copy=1e9, launch_us=1.0)
    plain, last = (compiled(Mixed(), channels_last=way, profile=profile).stages[0, 0].graph for way in (False, True))
    before, after = (
        sum(facts.need(node, Cost).us for node in graph.nodes if node.target in (torch.conv1d, torch.conv2d))
        for graph in (plain, last)
    )
    assert after == pytest.approx(before)
    views = [node for node in last.nodes if node.target in (torch.unsqueeze, torch.squeeze)]
    assert views and all(facts.need(node, Cost) == Cost() for node in views)
    of_input, inside = (facts.need(node, Cost) for node in conversions(last))
    assert (of_input.forward_us, of_input.backward_us) == (pytest.approx(1 + 2 * 4 * 2 * 3 * 144 / 1e3), 0.0)
    assert inside.forward_us == inside.backward_us == pytest.approx(1 + 2 * 4 * 2 * 6 * 144 / 1e3)


@pytest.mark.parametrize("dp", ["ddp", "fsdp2"])
def test_convolutions_weights_lie_so_too(dp: str) -> None:
    parts = {part.name: part.channels_last for part in compiled(Images(), dp=dp).stages[0, 0].tensors}
    assert {name for name, last in parts.items() if last} == {"first.weight", "second.weight"}


def test_collectives_hand_the_layout_on_and_send_in_it() -> None:
    """What is gathered from ranks lies as their pieces do: the convolution behind it reads it as it comes."""
    program = compiled(Images(), tp=2)
    graph = program.stages[0, 0].graph
    sent = [node for node in graph.nodes if node.target in ops.COLLECTIVES]
    assert sent and all(node.kwargs == {"last": 1} for node in sent if len(facts.need(node, Value).shape) == 4)
    assert len(conversions(graph)) == 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("net", NETS)
def test_all_ranks_send_in_the_same_order(net: str, ranks: int) -> None:
    """Where a rank has one channel, or none, too: their graphs keep the same nodes."""
    options = Options(tp=ranks, channels_last=True)
    program, report = compile_program(made(net), images(), options)
    assert report is not None
    graphs = [program.stages[0, rank].graph for rank in range(ranks)]
    sent = [[(node.name, node.kwargs) for node in graph.nodes if node.target in ops.COLLECTIVES] for graph in graphs]
    assert sent[0] and all(own == sent[0] for own in sent)
    assert len({len(graph.nodes) for graph in graphs}) == 1


class Alone(Images):
    """One convolution, whose channels are merged with places behind it."""

    def __init__(self, head: int = 6 * 144) -> None:
        super().__init__()
        self.head = nn.Linear(head, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).flatten(1))  # type: ignore[no-any-return]


class Pooled(Alone):
    """A quarter of the places are left when channels are merged with them."""

    def __init__(self) -> None:
        super().__init__(6 * 36)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.max_pool2d(self.first(x), 2).flatten(1))  # type: ignore[no-any-return]


class Linear(nn.Module):
    """No convolution, and a product of stacks of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ x.mT).mean((1, 2))  # type: ignore[no-any-return]


TOY = MachineProfile(name="toy", flops={"float32": 1e9}, copy=1e9, launch_us=1.0)


def us(*shape: int) -> float:
    """A copy of so many numbers on the toy machine."""
    return 1 + 2 * 4 * math.prod(shape) / 1e3


ENTRY, WHOLE, QUARTER = us(2, 3, 12, 12), 2 * us(2, 6, 12, 12), 2 * us(2, 6, 6, 6)
"""The copy of the images, which have no gradient, and of values behind the first convolution, which have one."""


@pytest.mark.parametrize(
    ("make", "usual", "last"),
    [
        (Alone, ENTRY + WHOLE, ENTRY + WHOLE),
        (Pooled, ENTRY + WHOLE, ENTRY + QUARTER),
        (Images, ENTRY + 3 * WHOLE, ENTRY),
        (Twice, ENTRY + 3 * WHOLE, ENTRY + WHOLE),
        (Linear, 0.0, 0.0),
        # its three convolutions read and give 3, 8, 8, 24, 8 and 8 channels; v, k and q, of 8 each, are multiplied
        (Heads, ENTRY + 4 * 2 * us(2, 8, 144) + 2 * us(2, 24, 144), ENTRY + 4 * 2 * us(2, 8, 144)),
    ],
)
def test_channels_lie_last_where_that_takes_fewer_copies(make: type[nn.Module], usual: float, last: float) -> None:
    program = compiled(make(), channels_last="auto", profile=TOY)
    found = copies_for(program.source, program.plan, TOY)
    assert (found.usual, found.last) == (pytest.approx(usual), pytest.approx(last))
    assert program.plan.channels_last is (last < usual)
    assert bool(conversions(program.stages[0, 0].graph)) is program.plan.channels_last
    said = [text for text in program.notices if text.startswith("images lie in the usual order: copies take")]
    assert len(said) == (usual > 0 and not program.plan.channels_last)


def test_fused_neurons_are_counted_as_they_run() -> None:
    """They hand the layout on: one conversion where the separate neurons are layers of their own."""
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    layer = pytest.importorskip("spikingjelly.activation_based.layer")
    convolutions = [layer.Conv2d(3, 3, 3, padding=1, step_mode="m", bias=False) for _ in range(3)]
    model = nn.Sequential(*(part for conv in convolutions for part in (conv, neuron.LIFNode(step_mode="m"))))
    given = {"channels_last": "auto", "profile": TOY, "verify": "off", "input_layout": "TNCHW", "fuse": True}
    program, _ = compile_program(model, torch.rand(4, 2, 3, 6, 6), Options(**given))
    assert copies_for(program.source, program.plan, TOY).last == pytest.approx(us(4, 2, 3, 6, 6))
    assert program.plan.channels_last


def test_a_given_plan_says_where_channels_lie() -> None:
    x = torch.rand(2, 3, 12, 12)
    for last in (True, False):
        plan = compiled(Images(), channels_last=last).plan
        found, _ = compile_program(Images(), x, Options(verify="off", channels_last="auto"), plan)
        assert found.plan.channels_last is last


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="channels_last='fast' is not known"):
        Options(channels_last="fast")


def test_a_plan_that_does_not_say_so_changes_nothing() -> None:
    assert conversions(compiled(Images(), channels_last=None).stages[0, 0].graph) == []


@pytest.mark.parametrize("make", [Images, Sequences, Mixed])
@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}])
def test_the_program_computes_what_the_module_computes(make: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 3, 12, 12, dtype=torch.float64)
    _, report = compile_program(make().double(), x, Options(channels_last=True, **options))
    assert report is not None


def test_stacks_of_matrices_are_multiplied_as_they_lie() -> None:
    graph = compiled(Heads()).stages[0, 0].graph
    products = [node for node in graph.nodes if node.target in (torch.matmul, ops_layout.matmul)]
    assert [node.target for node in products] == [ops_layout.matmul] * 2
    assert {facts.need(node, Value).shape for node in products} == {(2, 4, 2, 2), (2, 4, 2, 144)}


def test_what_is_gathered_alone_is_laid_out_before() -> None:
    """Each rank converts its own channels, and the gather sends them as they then lie."""
    program = compiled(Heads(), tp=2, shard={"point": "column"})
    for rank in range(2):
        graph = program.stages[0, rank].graph
        _, made = conversions(graph)
        (user,) = made.users
        assert user.target is ops.all_gather and user.kwargs == {"last": 1}
        assert facts.need(made, Value).shape == (2, 4, 144)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_gathered_and_read_by_the_rank_itself_is_laid_out_once(ranks: int) -> None:
    """Whichever comes first, over sequences and over images: the copy stands before the gather."""
    shard = {"first": "column", "point": "column", "apart": "group", "full": "column", "depth": "group"}
    program, report = compile_program(made("branches"), images(), Options(channels_last=True, tp=ranks, shard=shard))
    assert report is not None
    for rank in range(ranks):
        graph = program.stages[0, rank].graph
        of_input, *both = conversions(graph)
        assert [node.args[0].target for node in both] == [torch.cumsum] * 2  # type: ignore[union-attr]
        for node in both:
            assert len(node.users) == 2 and any(user.target is ops.all_gather for user in node.users)
