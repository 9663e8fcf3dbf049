"""One rank's part of the network: its tensor slices and leaf copies in a module, and stage graphs bound over it.

A rank runs one stage, or several where the schedule interleaves; they share the module.

The module owns copies: the user's tensors are only read. Several graphs (another T, another image size, eval mode) can
be bound over one module, because names and slices follow from the plan alone.

State of neurons lives on the leaf copies and is reset before every microbatch. What a microbatch in flight still needs
of it for backward is held by its autograd graph, so the next one starts from the initial state and disturbs nothing.

A name of the user (`layer1.0.weight`) usually is the path of the tensor in the module. Leaves may keep a tensor
elsewhere (a NamedTuple's field becomes a parameter of the leaf copy), so paths are found by identity when the module is
built. Under FSDP2 the module keeps what graphs read, `sharded` what the optimizer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from snnpart import frameworks, ops, ops_layout, ops_pool
from snnpart.effects import writes_buffer
from snnpart.errors import LaunchError
from snnpart.graph import BATCH_SIZE, Body, SpikeGraph
from snnpart.ops_fused import FusedNeuron
from snnpart.ops_later import WeightLater, itself, later
from snnpart.ops_packed import PackedInput
from snnpart.program import CompiledProgram, StageProgram, TensorSlice
from snnpart.runtime.compiled import compiled, leave_alone, left_alone
from snnpart.runtime.kernels import bits as kernel_bits
from snnpart.runtime.kernels.batch_norm import batch_norm
from snnpart.runtime.kernels.fused_neuron import Fused
from snnpart.runtime.kernels.layout import channels_last, matmul
from snnpart.runtime.kernels.max_pool import max_pool2d
from snnpart.runtime.localise import cut_reads, localise
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.split_backward import views_for_readers

_SEED_STEP = 1_000_003


class Between(Protocol):
    """Carries the state of leaves from a microbatch's forward to its next one."""

    def begin(self, number: int, paths: Iterable[str]) -> None: ...
    def keep(self, number: int, bound: BoundStage, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take the outputs that stay here (`StageProgram.keeps`) from a stage's results; the others."""

    def end(self, number: int, size: int, paths: Iterable[str]) -> None: ...


class Gathering(Protocol):
    """Makes parameters whole while a graph reads them (`runtime.fsdp2`)."""

    def mark(self, graph: fx.Graph, program: StageProgram) -> None: ...
    def reading(self) -> AbstractContextManager[None]: ...


_KERNELS = (
    (ops.batch_norm, batch_norm),
    (ops.batch_norm_copies, batch_norm),
    (ops_layout.channels_last, channels_last),
    (ops_layout.matmul, matmul),
)
"""Operations, and what runs in their place where torch.compile does not make the kernels."""


class Taken(dict[str, Tensor]):
    """Values that are this rank's already: cut, on its device, and its own (see `runtime.values`)."""


class StageModule(Body):
    """A body that can be wrapped by DDP or FSDP2: its forward runs whichever bound graph it is given."""

    compiles = False
    """Whether graphs are compiled by torch.compile when they are bound."""

    notice: Callable[[str], None] | None = None
    """Where `uncompiled` says so."""

    rounds = True
    """Whether states are rounded as `neuron_dtype` says: not while the program is compared with the user's module."""

    def bound(self, target: Any) -> Any:
        """Fused neurons, norms, poolings that keep codes, changes of layout, products of stacks of matrices and the
        packing of bits run as kernels on a GPU. What torch.compile can look into (norms, layouts, products) is its own
        there."""
        if isinstance(target, PackedInput):
            return replace(target, pack=kernel_bits.pack, unpack=kernel_bits.unpack)
        if self.compiles:  # torch.compile looks into what is not ours
            target = target.function if isinstance(target, WeightLater) else itself if target is later else target
        bound = super().bound(target)
        found = Fused(target, self, bound) if isinstance(target, FusedNeuron) else bound
        found = max_pool2d if target is ops_pool.max_pool2d else found
        if self.compiles:
            return left_alone(found)
        return next((kernel for operation, kernel in _KERNELS if operation is target), found)

    def bind(self, graph: fx.Graph, bound: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
        if not self.compiles:
            return super().bind(graph, bound)
        function = compiled(self.function_of(graph, bound), self.uncompiled)
        return lambda *args: function(self, *args)

    def uncompiled(self, why: str) -> None:
        """Say, the first time, that torch does not compile what it was to compile."""
        notice, self.notice = self.notice, None
        if notice is not None:
            notice(f"torch cannot compile pieces of the network, which run as they are; of the first it says: {why}")

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        return run(*args)


@dataclass(frozen=True)
class BoundStage:
    """A stage graph over a module, and the network it was lowered from. `evaluate` is for eval without gradients;
    `moved`: the inputs that another pipeline rank has, and which (`CompiledProgram.moved_states`)."""

    program: StageProgram
    source: SpikeGraph
    reads: tuple[int, ...]
    takes_batch: bool
    run: Callable[..., tuple[Any, ...]]
    evaluate: Callable[..., tuple[Any, ...]]
    moved: tuple[tuple[int, int], ...] = ()

    @property
    def batch(self) -> int:
        """The example batch, at which the ports' shapes are stated."""
        return self.source.batch


class Stage:
    """This rank's stages: module, slices by the user's names, and the reset of its neurons."""

    def __init__(
        self,
        programs: Sequence[StageProgram],
        values: Mapping[str, Tensor],
        device: torch.device,
        *,
        split: bool = False,
        compiles: bool = False,
    ) -> None:
        """`values` holds the user's full tensors by name, or this rank's (`Taken`); `split` says that backward comes in
        halves, `compiles` that graphs are compiled."""
        self.indices, self.device, self._split = tuple(program.stage for program in programs), device, split
        self.slices = {part.name: part for program in programs for part in program.tensors}
        self.stage_of = {part.name: program.stage for program in programs for part in program.tensors}
        own = isinstance(values, Taken)
        tensors = {
            name: values[name] if own else local_copy(part, values[name], device) for name, part in self.slices.items()
        }
        self.leaves = {path: _clone(path, p, tensors).to(device) for p in programs for path in p.leaves}
        held = {p.name: (_kind(p), tensors[p.name]) for p in self.slices.values() if p.leaf is None}
        self.module = StageModule(held, self.leaves)
        self.module.compiles = compiles
        for leaf in self.leaves.values() if compiles else ():
            leave_alone(leaf)
        self.paths = _paths(self.module, tensors)
        self.between: Between | None = None
        self.gathering: Gathering | None = None
        self.sharded: Mapping[str, nn.Parameter] = {}
        self._launched: SpikeGraph | None = None
        self._seed: int | None = None
        self.generator: torch.Generator | None = None
        """On CUDA, what the ranks of a tp group draw from."""
        self.passes = 0
        self._resets = {
            path: [(frameworks.adapter_for(m), m) for m in leaf.modules()] for path, leaf in self.leaves.items()
        }

    @property
    def place(self) -> str:
        """`stage 1` or `stages 0 and 3`, for messages."""
        numbers = " and ".join(map(str, self.indices))
        return f"stages {numbers}" if len(self.indices) > 1 else f"stage {numbers}"

    def bind(self, compiled: CompiledProgram, tp_rank: int) -> Mapping[int, BoundStage]:
        """The stage graphs of `compiled` (the same network, perhaps for another T or mode) over this module."""
        self._launched = self._launched or compiled.source
        for index in self.indices:
            self._hold_constants(compiled.source, compiled.stage(index, tp_rank))
        return {index: self._bind(compiled, compiled.stage(index, tp_rank)) for index in self.indices}

    def _hold_constants(self, source: SpikeGraph, program: StageProgram) -> None:
        """Take the tensors that the user did not register and that the launched network does not read (the strides of
        a detector that decodes in eval alone): nothing was placed for them at the launch."""
        assert self._launched is not None
        for part in program.tensors:
            if part.kind != "constant" or part.leaf is not None or part.name in self.slices:
                continue
            if part.name not in self._launched.tensors:
                self.slices[part.name], self.stage_of[part.name] = part, program.stage
                self.module.hold(
                    part.name, _kind(part), local_copy(part, source.tensors[part.name].tensor, self.device)
                )
                self.paths[part.name] = part.name

    def _bind(self, compiled: CompiledProgram, program: StageProgram) -> BoundStage:
        cut = self._cut_when_read(program)
        self._check_same(program, {part.name for part in cut})
        names = [node.target for node in program.graph.nodes if node.op == "placeholder"]
        order = {info.name: i for i, info in enumerate(compiled.source.inputs)}
        graph = self._local(program.graph, program, cut)
        if self._split:
            views_for_readers(graph)
        run = self.module.bind(graph)
        other = program.evaluation
        return BoundStage(
            program=program,
            source=compiled.source,
            reads=tuple(order[name] for name in program.reads),
            takes_batch=BATCH_SIZE in names,
            run=run,
            evaluate=run if other is None else self.module.bind(self._local(other, program, cut)),
        )

    def _local(self, graph: fx.Graph, program: StageProgram, cut: Iterable[TensorSlice]) -> fx.Graph:
        """A copy of one of the program's graphs for this rank's device and tensors."""
        own = localise(graph, self.device)
        cut_reads(own, cut)
        if self.gathering is not None:
            self.gathering.mark(own, program)
        return own

    def _cut_when_read(self, program: StageProgram) -> list[TensorSlice]:
        """Buffers that this graph reads in parts and that are held whole, because the launched graph writes them."""
        held = {part.name for part in self.slices.values() if part.dim is None and part.leaf is None}
        return [p for p in program.tensors if p.dim is not None and not p.requires_grad and p.name in held]

    def _check_same(self, program: StageProgram, cut: Container[str]) -> None:
        """A graph bound later must find the tensors and leaves it was cut for."""
        wanted = {p.name: (p.dim, p.pieces) for p in program.tensors if p.name not in cut}
        have = {p.name: (p.dim, p.pieces) for p in self.slices.values() if program.stage in self._stages_of(p)}
        differ = sorted(n for n in wanted if have.get(n) != wanted[n]) + sorted(set(program.leaves) - set(self.leaves))
        copied = {n for n, part in self.slices.items() if part.stages and part.kind != "parameter"}
        differ += sorted(copied & written(program.graph))  # copies would drift apart
        if differ:
            raise LaunchError(
                f"{differ[:5]} lie elsewhere in the new graph than in the launched one",
                where=f"stage {program.stage}",
                fix="compile the other signature with the launched program's plan",
            )

    def _stages_of(self, part: TensorSlice) -> tuple[int, ...]:
        return part.stages or (self.stage_of[part.name],)

    def stands_for(self, name: str) -> bool:
        """Whether this rank counts and writes the tensor: of those that hold copies the first stage's does."""
        return self._stages_of(self.slices[name])[0] in self.indices

    def forward(
        self, bound: BoundStage, inputs: Sequence[Tensor], received: Sequence[Tensor], size: int, number: int = 0
    ) -> tuple[Any, ...]:
        """Run microbatch `number`, of `size` samples, from reset state, or from what `between` kept of it.

        Args:
            inputs: all tensor inputs of the program, cut to the microbatch.
            received: the values of `program.receives`.
        """
        tail = (size,) if bound.takes_batch else ()
        run = bound.run if self.module.training or torch.is_grad_enabled() else bound.evaluate
        self._reset(bound.program.leaves)
        for path, info in bound.program.leaves.items():
            frameworks.fit(self.leaves[path], info.module, size, bound.batch)
        try:
            if self.between is not None:
                self.between.begin(number, bound.program.leaves)
            with self._random_numbers(), self.gathering.reading() if self.gathering else nullcontext():
                result = self.run(run, *(inputs[i] for i in bound.reads), *received, *tail)
            if self.between is not None:
                self.between.end(number, size, bound.program.leaves)
                result = self.between.keep(number, bound, result)
            return result
        finally:
            self._reset(bound.program.leaves)

    def share_seed(self, ranks: Ranks) -> None:
        """Have the tp ranks draw the same random numbers from now on: they hold the same replicated activations."""
        if ranks.mesh.tp > 1:
            self._seed = ranks.gather(torch.initial_seed(), ranks.axes["tp"])[0] + _SEED_STEP * ranks.at.dp
            if self.device.type == "cuda":
                self.generator = torch.Generator(self.device).manual_seed(self._seed % 2**63)

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        if self._seed is None:
            yield
            return
        with torch.random.fork_rng([]), self._own_generator():
            torch.default_generator.manual_seed((self._seed + self.passes) % 2**63)
            self.passes += 1
            yield

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        """A block that draws from our generator on CUDA: exchanged, not seeded, which a graph can capture."""
        if self.generator is None:
            yield
            return
        default = torch.cuda.default_generators[self.device.index or 0]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generator)
        try:
            yield
        finally:
            default.graphsafe_set_state(before)

    def run(self, function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """Call through the module, so that hooks of a wrapper see it."""
        result: tuple[Any, ...] = self.module(function, *args)
        return result

    def reset(self) -> None:
        """Drop the state of every neuron."""
        self._reset(self._resets)

    def _reset(self, paths: Iterable[str]) -> None:
        for path in paths:
            for adapter, module in self._resets[path]:
                adapter.reset(module)

    def tensor(self, name: str) -> Tensor:
        """The local tensor of the user's name, as it hangs in the module; a DTensor where FSDP2 has cut it."""
        found: Tensor = self.sharded[name] if name in self.sharded else _at(self.module, self.paths[name])
        return found

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The stage's parameters under the user's names."""
        for name, part in self.slices.items():
            if _kind(part) == "parameter":
                yield name, self.tensor(name)  # type: ignore[misc]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The stage's buffers and constants under the user's names."""
        for name, part in self.slices.items():
            if _kind(part) != "parameter":
                yield name, self.tensor(name)


def local_copy(part: TensorSlice, whole: Tensor, device: torch.device) -> Tensor:
    """This rank's own copy of its part of the user's tensor, on its device; a parameter where the part is one."""
    cut = whole.detach() if part.dim is None else ops.select_pieces(whole.detach(), part.dim, part.pieces)
    layout = torch.channels_last if part.channels_last else torch.contiguous_format
    # A copy of one output channel alone would keep a stride that torch's convolutions on the CPU do not take.
    local = torch.empty(cut.shape, dtype=cut.dtype, device=device, memory_format=layout).copy_(cut)
    if _kind(part) == "parameter":
        return nn.Parameter(local, requires_grad=part.requires_grad)
    return local


def written(graph: fx.Graph) -> set[str]:
    """The tensors that the operations read which change buffers."""
    reads = (read for node in graph.nodes if writes_buffer(node) for read in node.all_input_nodes)
    return {str(read.target) for read in reads if read.op == "get_attr"}


def _kind(part: TensorSlice) -> str:
    """Learned tensors that the user did not register (fields of a NamedTuple) are parameters here."""
    return "parameter" if part.kind == "parameter" or part.requires_grad else part.kind


def _clone(path: str, program: StageProgram, tensors: Mapping[str, Tensor]) -> nn.Module:
    return frameworks.clone_leaf(program.leaves[path].module, program.inside(path, tensors))


def _paths(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Where each tensor hangs in the module."""
    held = {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
    }
    by_identity = {id(tensor): path for path, tensor in held.items()}
    return {
        name: name if held.get(name) is tensor else by_identity.get(id(tensor), name)
        for name, tensor in tensors.items()
    }


def _at(module: nn.Module, path: str) -> Any:
    *containers, name = path.split(".")
    found: Any = module
    for atom in containers:
        found = getattr(found, atom)
    return getattr(found, name)
