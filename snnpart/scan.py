"""Runs a `Loop`: where that works in the open (`step_graph`), else step by step as it is written.

What a step's values are like is known when the first step has run: carried values may begin as something else (a
number, an empty tensor). An opened step holds for one set of shapes and types and is kept. Where the first step differs
only in what is carried into it, all steps run in the open; otherwise the first runs as it is written.

Values that are made for all steps in one call must stay in the processor's cache, or memory costs more than the calls
saved: on the CPU larger ones are made step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from snnpart import effects, frameworks
from snnpart.ops_time import Loop, apart, joined, leaf_paths, run_steps
from snnpart.ops_time import Step as Run
from snnpart.step_graph import Shape, Step, StepModule, carries_alike, open_step
from snnpart.step_sort import Sorted, ancestors, extract, first_carried, sort_step

CACHE_BYTES = 8 * 2**20
"""Of a value of all steps that is made in one call on the CPU: a share of a common last-level cache."""

_KEPT = 16
_HERE = object()
Bind = Callable[[fx.Graph], Run]
Values = dict[fx.Node, Tensor]
Ran = tuple[tuple[Tensor, ...], Sequence[Any]]


@dataclass(frozen=True)
class Packed:
    """Nested arguments as their tensors and the rest."""

    tensors: tuple[Tensor, ...]
    spec: pytree.TreeSpec
    rest: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> Packed:
        leaves, spec = pytree.tree_flatten(value)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return cls(tensors, spec, tuple(_HERE if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The arguments with these tensors."""
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if leaf is _HERE else leaf for leaf in self.rest], self.spec)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for arguments for which a step computes alike."""
        rest = tuple("tensor" if leaf is _HERE else repr(leaf) for leaf in self.rest)
        return *map(_like, self.tensors), self.spec, rest


def _like(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device, x.requires_grad


class Scan:
    """A loop bound over a module: called as the loop is, with sequences, fixed values, and the first carried ones."""

    def __init__(self, loop: Loop, bind: Bind, submodule: Callable[[str], nn.Module]) -> None:
        self._loop, self._submodule = loop, submodule
        self._body, self._first = bind(loop.body), bind(loop.graphs[-1])
        self._has_effects = any(effects.is_random(node) or effects.writes_buffer(node) for node in loop.nodes())
        self._opened: dict[Any, Opened | None] = {}

    def __call__(self, sequences: Sequence[Tensor], fixed: Sequence[Any], carried: Sequence[Any]) -> tuple[Tensor, ...]:
        return self.run(sequences, fixed, carried, None)[0]

    def run(
        self, sequences: Sequence[Tensor], fixed: Sequence[Any], carried: Sequence[Any], state: Sequence[Any] | None
    ) -> Ran:
        """Results, and what is carried beyond the last step; `state` is what an earlier call carried (None: begin)."""
        opened = self._open(sequences, fixed, carried)
        if opened is not None:
            return opened(sequences, fixed, carried, state)
        if state is not None:
            return run_steps(self._loop, self._body, self._body, sequences, fixed, state)
        return run_steps(self._loop, self._body, self._first, sequences, fixed, carried)

    def _open(self, sequences: Sequence[Tensor], fixed: Sequence[Any], carried: Sequence[Any]) -> Opened | None:
        leaves = {path: self._submodule(path) for node in self._loop.nodes() for path in leaf_paths(node)}
        given = Packed.of((tuple(sequences), tuple(fixed), tuple(carried)))
        if not self._can_open(leaves, given):
            return None
        tensors = [x for leaf in leaves.values() for x in _tensors(leaf)]
        mode = (torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")))
        key = given.key, tuple(map(_like, tensors)), tuple(leaf.training for leaf in leaves.values()), mode
        if key not in self._opened:
            while len(self._opened) >= _KEPT:
                self._opened.pop(next(iter(self._opened)))
            with _unchanged(leaves, given):
                self._opened[key] = _opened(self._loop, leaves, self._first, sequences, fixed, carried)
        return self._opened[key]

    def _can_open(self, leaves: Mapping[str, nn.Module], given: Packed) -> bool:
        """Whether the layers get their state as arguments, nothing hooks into them, and the values hold data."""
        plain = all(type(x) in (Tensor, nn.Parameter) and not x.is_meta for x in given.tensors)
        modules = [module for leaf in leaves.values() for module in leaf.modules()]
        plain = plain and not any(p.is_inference() for module in modules for p in module.parameters(recurse=False))
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        return (
            self._is_explicit(leaves) and plain and not (hooked or self._has_effects or torch.compiler.is_compiling())
        )

    def _is_explicit(self, leaves: Mapping[str, nn.Module]) -> bool:
        """Whether no layer reads state that it kept itself; in a first step, before which it was reset, it may."""
        calls = [node for node in self._loop.nodes() if node.op == "call_module"]
        given = all(len(node.all_input_nodes) + (None in node.args) > 1 for node in calls)
        later = [(leaves[str(node.target)], node) for node in calls if node.graph is self._loop.body]
        takes = (frameworks.adapter_for(leaf).takes_all_state(leaf, node.args, node.kwargs) for leaf, node in later)
        return given and all(takes)


def _tensors(leaf: nn.Module) -> Iterator[Tensor]:
    """Parameters and saved buffers. Not from `state_dict`: with FSDP2 that would shard the parameters again."""
    for module in leaf.modules():
        yield from module.parameters(recurse=False)
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer


@contextmanager
def _unchanged(leaves: Mapping[str, nn.Module], given: Packed) -> Iterator[None]:
    """A block that tries the step: the layers, which may keep their state beside returning it, and the random numbers
    are afterwards what they were."""
    devices = {x.device.index for x in given.tensors if x.is_cuda}
    with frameworks.preserved(nn.ModuleList(leaves.values())), torch.random.fork_rng(sorted(devices)):
        yield


def _opened(
    loop: Loop,
    leaves: Mapping[str, nn.Module],
    first: Run,
    sequences: Sequence[Tensor],
    fixed: Sequence[Any],
    carried: Sequence[Any],
) -> Opened | None:
    """The loop's steps in the open, for values like those given; None where that does not work."""
    begin = [sequence[0] for sequence in sequences]
    made = Packed.of(tuple(first(*begin, *fixed, *carried)[: len(carried)]))
    if any(leaf is not _HERE for leaf in made.rest):
        return None
    counts = Shape(len(begin), len(Packed.of(tuple(fixed)).tensors), len(made.tensors))
    ordinary = Packed.of((*begin, *fixed, *made.fill(made.tensors)))
    module = StepModule(loop.body, leaves, ordinary.fill)
    step = open_step(module, ordinary.tensors, counts)
    if step is None or not carries_alike(step):
        return None
    in_cache = loop.steps * max((x.nbytes for x in begin), default=0) <= CACHE_BYTES
    batched = in_cache or any(x.device.type != "cpu" for x in ordinary.tensors)
    start = _begin(loop, leaves, step, Packed.of((*begin, *fixed, *carried)))
    if start is None and loop.steps == 1:
        return None
    return Opened(loop, sort_step(step, batched), module, (first, start), made.fill)


def _begin(loop: Loop, leaves: Mapping[str, nn.Module], step: Step, given: Packed) -> Piece | None:
    """Makes what the first step reads in the place of carried values; None where it differs in more."""
    module = StepModule(loop.graphs[-1], leaves, given.fill)
    known = step.shape.sequences + step.shape.fixed
    shape = Shape(step.shape.sequences, step.shape.fixed, len(given.tensors) - known)
    first = open_step(module, given.tensors, shape)
    found = None if first is None else first_carried(step, first)
    if first is None or found is None:
        return None
    needed = ancestors(found)
    return Piece([node for node in first.operations if node in needed], found, (*first.inputs, *first.tensors))


class Piece:
    """Some operations as a function: the values of `inputs` in, those of `outputs` out."""

    def __init__(self, nodes: Iterable[fx.Node], outputs: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        code = extract(nodes, self.inputs, self.outputs).python_code("self")
        scope = dict(code.globals)
        exec(compile(code.src, f"<snnpart step {id(self)}>", "exec"), scope)
        self._run = scope["forward"]

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = self._run(None, *values)
        return made

    def over(self, values: Mapping[fx.Node, Tensor]) -> Values:
        """The outputs by their nodes."""
        return dict(zip(self.outputs, self(*(values[node] for node in self.inputs)), strict=True))


def _piece(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Piece:
    """The operations with the inputs that they read."""
    own = set(nodes)
    read = [source for node in nodes for source in node.all_input_nodes if source not in own]
    return Piece(nodes, outputs, tuple(dict.fromkeys([*read, *(node for node in outputs if node not in own)])))


class Opened:
    """A loop whose steps run in the open; without `start` the first one runs as it is written."""

    def __init__(
        self,
        loop: Loop,
        step: Sorted,
        module: StepModule,
        begin: tuple[Run, Piece | None],
        nest: Callable[[Sequence[Tensor]], Sequence[Any]],
    ) -> None:
        """`nest` puts the tensors that are carried back into the form in which the loop carries them."""
        self._loop, self._graph, self._module, self._nest = loop, step.step, module, nest
        self._first, self._start = begin
        self._once, self._before = _piece(step.once, step.once), _piece(step.before, step.before)
        self._state, self._results = self._graph.carried, self._graph.results
        self._late = tuple(dict.fromkeys(node for node in self._results if node in step.after))
        self._after = _piece(step.after, self._late)
        read_after = [node for node in self._after.inputs if node in self._state]
        self._kept = tuple(dict.fromkeys([*read_after, *(n for n in self._results if n not in self._late)]))
        self._each_piece(step)

    def _each_piece(self, step: Sorted) -> None:
        """What runs step by step: it is given values of the step, then what is carried, then all else."""
        outputs, carried = (*self._state, *self._kept), self._graph.group("carried")
        changing = {*self._graph.group("sequences"), *step.before}
        read = [node for node in _piece(step.each, outputs).inputs if node not in carried]
        self._streams = tuple(node for node in read if node in changing)
        self._fixed = tuple(node for node in read if node not in changing)
        self._each = Piece(step.each, outputs, (*self._streams, *carried, *self._fixed))

    def __call__(
        self, sequences: Sequence[Tensor], fixed: Sequence[Any], carried: Sequence[Any], state: Sequence[Any] | None
    ) -> Ran:
        values = self._values(sequences, fixed)
        begun: Sequence[Tensor] | None = None
        if state is not None:
            now: Sequence[Tensor] = Packed.of(tuple(state)).tensors
        elif self._start is not None:
            now = self._started(sequences, fixed, carried)
        else:
            out = self._first(*(sequence[0] for sequence in sequences), *fixed, *carried)
            now, begun = Packed.of(tuple(out[: len(carried)])).tensors, out[len(carried) :]
        kept, last = self._run(values, now, 0 if begun is None else 1)
        return self._joined(values, kept, begun), self._nest(last)

    def _values(self, sequences: Sequence[Tensor], fixed: Sequence[Any]) -> Values:
        """What does not change from step to step, and what changes at all steps [T, ...]."""
        values = dict(zip(self._graph.group("fixed"), Packed.of(tuple(fixed)).tensors, strict=True))
        values |= {node: self._module.tensor(str(node.target)) for node in self._graph.tensors}
        values |= self._once.over(values)
        values |= dict(zip(self._graph.group("sequences"), sequences, strict=True))
        return values | self._before.over(values)

    def _started(self, sequences: Sequence[Tensor], fixed: Sequence[Any], carried: Sequence[Any]) -> Sequence[Tensor]:
        assert self._start is not None
        given = Packed.of((*(sequence[0] for sequence in sequences), *fixed, *carried)).tensors
        tensors = (self._module.tensor(str(node.target)) for node in self._start.inputs[len(given) :])
        return self._start(*given, *tensors)

    def _run(
        self, values: Values, state: Sequence[Tensor], begin: int
    ) -> tuple[dict[fx.Node, list[Tensor]], Sequence[Tensor]]:
        """The steps from `begin` on: the kept values of each, and what the last one carries."""
        streams = [apart(values[node]) for node in self._streams]
        fixed = [values[node] for node in self._fixed]
        count, kept = len(self._state), []
        for t in range(begin, self._loop.steps):
            out = self._each(*(stream[t] for stream in streams), *state, *fixed)
            state = out[:count]
            kept.append(out[count:])
        return {node: [found[i] for found in kept] for i, node in enumerate(self._kept)}, state

    def _joined(
        self, values: Values, kept: Mapping[fx.Node, list[Tensor]], begun: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...]:
        """The results of the loop; `begun` are those of a first step that ran apart."""
        late = self._made_late(values, kept, begun is not None)
        found = []
        for at, (node, keep) in enumerate(zip(self._results, self._loop.keep, strict=True)):
            first = [] if begun is None else [begun[at]]
            if node in late:
                made = late[node]
                if keep == "last":
                    made = made[-1]
                elif first:
                    made = torch.cat([first[0].unsqueeze(0), made])
            else:
                made = kept[node][-1] if keep == "last" else joined([*first, *kept[node]])
            found.append(made)
        return tuple(found)

    def _made_late(self, values: Values, kept: Mapping[fx.Node, list[Tensor]], apart: bool) -> Values:
        """What is made of all steps at once: [T, ...], without a first step that ran apart."""
        if not self._late:
            return {}
        given = {
            node: joined(kept[node]) if node in kept else self._later(values[node], node, apart)
            for node in self._after.inputs
        }
        return self._after.over(given)

    def _later(self, value: Tensor, node: fx.Node, apart: bool) -> Tensor:
        changes = node in self._graph.group("sequences") or node in self._before.outputs
        return value[1:] if apart and changes else value


class Rounds:
    """A loop that takes several steps at a time: its body's own loops go on from round to round."""

    def __init__(self, loop: Loop, bind: Callable[[fx.Graph, Callable[[Any], Any]], Run], bound: Callable[[Any], Any]):
        """`bind(graph, bound)` makes a function of a graph; `bound` says what a node's target is."""
        self._loop, self._sizes = loop, round_sizes(loop)
        self._later = _Round(loop.body, bind, bound)
        self._first = self._later if loop.first is None else _Round(loop.first, bind, bound)

    def __call__(self, sequences: Sequence[Tensor], fixed: Sequence[Any], carried: Sequence[Any]) -> tuple[Tensor, ...]:
        parts = [sequence.split(self._sizes) for sequence in sequences]
        results = []
        try:
            for at in range(len(self._sizes)):
                one = self._later if at else self._first
                results.append(one.body(*(part[at] for part in parts), *fixed))
                self._later.take_over(one)
        finally:
            self._first.forget()
            self._later.forget()
        return self._loop.joined_rounds(results)


def round_sizes(loop: Loop) -> list[int]:
    """How many steps each round of a loop in rounds takes."""
    rest = loop.steps % loop.together
    return [*([rest] if rest else ()), *[loop.together] * (loop.steps // loop.together)]


class _Round:
    """A round as a function, and the loops inside, in the order in which its graph calls them."""

    def __init__(self, graph: fx.Graph, bind: Callable[[fx.Graph, Callable[[Any], Any]], Run], bound: Any) -> None:
        self._inner = list[_Continued]()

        def continued(target: Any) -> Any:
            made = bound(target)
            if isinstance(made, Scan):
                made = _Continued(made)
                self._inner.append(made)
            return made

        self.body = bind(graph, continued)

    def take_over(self, other: _Round) -> None:
        """Go on from what the loops of another round, which differ in the number of steps alone, carried."""
        for inner, before in zip(self._inner, other._inner, strict=True):
            inner.state = before.state

    def forget(self) -> None:
        """Begin anew."""
        for inner in self._inner:
            inner.state = None


class _Continued:
    """A loop in rounds, and what it carried out of the last one."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self.state: Sequence[Any] | None = None

    def __call__(self, sequences: Sequence[Tensor], fixed: Sequence[Any], carried: Sequence[Any]) -> tuple[Tensor, ...]:
        results, self.state = self._scan.run(sequences, fixed, carried, self.state)
        return results
