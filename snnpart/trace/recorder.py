"""The recorder: which node holds the value of which tensor.

Every tensor object the user's code holds while tracing has a `Cell`: the node whose value it holds now. A write in
place gives the cell another node, so every name that the user has for the tensor sees the new value. Tensors that share
memory share a `Memory`, which counts writes; a view remembers its base and how it was made:

    y = x[0]; y += 1      y: node add;  its base x: index_assign(x, 0, add);  other views of x are made again when used

A fake tensor stands for each tensor the network owns (`fake`), one for the whole trace, so that writes into buffers are
seen by later reads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from snnpart import facts
from snnpart.compat import FakeTensor, blank_like, fake_mode, storage_key, without_torch_function
from snnpart.errors import TraceError
from snnpart.facts import Origin, Value, Values
from snnpart.graph import TRAINING, Assumption
from snnpart.trace import places, sizes, views
from snnpart.trace.cells import Call, Cell, How, Memory, items_of, value_of
from snnpart.trace.flags import TrainingFlag
from snnpart.trace.results import Results
from snnpart.trace.roots import Root

_NAMES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_LITERALS = (int, float, complex, str, type(None), type(...), *_NAMES)


class Recorder:
    """Builds one fx graph from what one forward does."""

    def __init__(self, roots: dict[int, Root], training: bool, keep_flag: bool = True) -> None:
        self.graph = fx.Graph()
        self.fakes = fake_mode()
        self.results = Results(self.fakes)
        self.roots = roots
        self.training = training
        self._keep_flag = keep_flag
        self.paused = False
        self.path: list[str] = [""]
        self.asked = sizes.Comparisons()
        self.assumptions: dict[tuple[str, str], Assumption] = {}
        self.specialised = False
        self.used: dict[str, Root] = {}
        self.failed: tuple[BaseException, str] | None = None
        self.refused: TraceError | None = None  # raised inside of TorchScript, which makes another error of it
        self._cells: dict[int, Cell] = {}
        self._memories: dict[int, Memory] = {}
        self._fake_of: dict[int, Tensor] = {}
        self._shared: dict[int, Memory] = {}
        self._kept: list[Tensor] = []
        self._training_node: fx.Node | None = None
        self._constants = 0

    # ---- places and messages

    def here(self) -> Origin:
        return places.here(self.path[-1])

    def error(self, what: str, fix: str = "") -> TraceError:
        """The error for something the user's current line does."""
        return TraceError(what, where=places.describe(self.here()), fix=fix)

    def assume(self, kind: str, text: str) -> None:
        """Note something that the trace takes as fixed, with the user's line."""
        place = self.here().place
        self.assumptions.setdefault((kind, text), Assumption(kind, text, place))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block nothing is recorded, and torch runs without the mode."""
        with self.unrecorded(), without_torch_function():
            yield

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Inside the block nothing is recorded, but known results are used."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def flag(self) -> TrainingFlag | bool:
        """What `module.training` is while tracing."""
        if self._keep_flag:
            return TrainingFlag(self.training, self._specialise)
        self._specialise()
        return self.training

    def _specialise(self) -> None:
        if not self.paused:
            self.specialised = True
            mode = "training" if self.training else "eval"
            self.assume("branch", f"the code branches on self.training; the graph holds for {mode} mode")

    # ---- tensors of the network

    def fake(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for a real one (or the tensor itself, if it is fake)."""
        if isinstance(tensor, FakeTensor):
            return tensor
        found = self._fake_of.get(id(tensor))
        return found if found is not None else self._adopt(tensor)

    def _adopt(self, tensor: Tensor) -> Tensor:
        root = self.roots.get(id(tensor)) or self._constant(tensor)
        if tensor.grad_fn is not None:
            raise self.error(
                f"'{root.name}' holds a tensor of an earlier forward, and is read here",
                "give the module a reset() without arguments, or pass reset=f, called as f(model)",
            )
        with self.pause():
            fake = blank_like(self.fakes, tensor)
            self._memories[storage_key(fake)] = self._shared.setdefault(storage_key(tensor), Memory())
        self._fake_of[id(tensor)] = fake
        self._kept.append(tensor)
        node = self.graph.create_node("get_attr", root.name)
        self.bind(fake, node)
        self._cells[id(fake)].root = root
        self.used[root.name] = root
        return fake

    def _constant(self, tensor: Tensor) -> Root:
        shape = tuple(tensor.shape)
        if tensor.requires_grad:
            raise self.error(
                f"a tensor of shape {shape} requires grad but belongs to no module of the model",
                "make it an attribute of the module that uses it",
            )
        root = Root(f"_constant{self._constants}", "constant", tensor, persistent=False, registered=False)
        self._constants += 1
        self.roots[id(tensor)] = root
        self.assume("constant", f"a tensor from outside the model, shape {shape}, is kept as '{root.name}'")
        return root

    def is_root(self, tensor: Tensor) -> bool:
        """Whether the tensor stands for one that the network owns."""
        return self._cells[id(tensor)].root is not None

    def is_written(self, tensor: Tensor) -> bool:
        """Whether forward has written into a tensor the network owns."""
        fake = self._fake_of.get(id(tensor))
        return fake is not None and self._cells[id(fake)].node.op != "get_attr"

    def written(self) -> Iterator[tuple[Root, fx.Node]]:
        """Tensors of the network that forward wrote into, with their last value."""
        for cell in list(self._cells.values()):
            if cell.root is not None and self.fresh(cell).op != "get_attr":
                yield cell.root, cell.node

    # ---- tensors to nodes

    def node(self, tensor: Tensor) -> fx.Node:
        """The node that holds the tensor's value now."""
        cell = self._cells.get(id(tensor))
        if cell is None and not isinstance(tensor, FakeTensor):
            cell = self._cells[id(self.fake(tensor))]
        if cell is None:
            raise self.error(
                f"a tensor of shape {tuple(tensor.shape)} was made by something the tracer cannot see "
                "(a compiled or scripted function, or a C++ extension that bypasses torch's functions)",
                "wrap it in an autograd.Function, or in a module that stays whole",
            )
        if cell.from_function:
            self._check_detached(cell)
        return self.fresh(cell)

    def knows(self, tensor: Tensor) -> bool:
        return id(tensor) in self._cells

    def _check_detached(self, cell: Cell) -> None:
        """A result of an autograd.Function that carries no gradient where its inputs do (no_grad around apply)."""
        inputs, cell.from_function = cell.from_function, ()
        grad = cell.tensor.requires_grad
        made = cell.node
        facts.put(made, replace(facts.need(made, Value), requires_grad=grad or any(t.requires_grad for t in inputs)))
        if not grad and cell.tensor.is_floating_point() and any(t.requires_grad for t in inputs):
            with self.graph.inserting_after(made):
                cell.node = self.graph.call_function(torch.detach, (made,))
            self.mark(cell.node, cell.tensor)

    def fresh(self, cell: Cell) -> fx.Node:
        """The cell's node; a view whose memory was written since is made again from its base."""
        if cell.seen != cell.memory.writes:
            if cell.base is not None:
                cell.node = self._again(cell, self.fresh(cell.base))
            cell.seen = cell.memory.writes
        return cell.node

    def _again(self, cell: Cell, base: fx.Node) -> fx.Node:
        now: dict[fx.Node | None, fx.Node] = {cell.base_node: base}
        for maker in cell.makers:
            now[maker] = self.graph.node_copy(maker, lambda node: now.get(node, node))
        return now[cell.makers[-1]]

    def argument(self, value: Any) -> Any:
        """A value as an argument of a node: tensors become nodes, numbers and names stay."""
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, _LITERALS):
            return sizes.plain(value)
        if isinstance(value, TrainingFlag):
            return self.training_node()
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            made = self.graph.call_function(type(value), tuple(self.argument(item) for item in value))
            facts.put(made, self.here(), Values(tuple(value_of(item) for item in value)))
            return made
        if isinstance(value, tuple):
            return tuple(self.argument(item) for item in value)
        if isinstance(value, list):
            return [self.argument(item) for item in value]
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.argument(value.tolist())
        raise self.error(
            f"an argument of type {type(value).__qualname__} cannot be kept in a graph",
            "pass numbers, strings and tensors (also in tuples, lists and dicts)",
        )

    def training_node(self) -> fx.Node:
        """The node that reads the flag `training`."""
        if self._training_node is None:
            self._training_node = self.graph.create_node("get_attr", TRAINING)
            facts.put(self._training_node, self.here())
        return self._training_node

    # ---- nodes

    def emit(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> None:
        """Record one operation: its node, and the cells of its results."""
        node_args = tuple(self.argument(arg) for arg in args)
        node_kwargs = {key: self.argument(value) for key, value in kwargs.items()}
        node = self.graph.create_node(op, target, node_args, node_kwargs)
        if isinstance(call.out, Tensor):
            self._result(call.out, (node,), call, None)
        else:
            facts.put(node, self.here(), value_of(call.out))
            self._results(call.out, (node,), call)

    def _results(self, out: Any, makers: tuple[fx.Node, ...], call: Call) -> None:
        items = items_of(out)
        pieces = tuple(item for item in items if isinstance(item, Tensor))
        keys = list(out) if isinstance(out, dict) else range(len(items))
        for index, (key, item) in enumerate(zip(keys, items, strict=True)):
            if isinstance(item, Tensor) and not any(item is t for t in call.inputs):
                taken = self.graph.call_function(operator.getitem, (makers[-1], key))
                self._result(item, (*makers, taken), call, (index, pieces))
            elif isinstance(item, (tuple, list, dict)):
                taken = self.graph.call_function(operator.getitem, (makers[-1], key))
                facts.put(taken, self.here(), value_of(item))
                self._results(item, (*makers, taken), call)

    def _result(
        self, out: Tensor, makers: tuple[fx.Node, ...], call: Call, piece: tuple[int, tuple[Tensor, ...]] | None
    ) -> None:
        if call.detached and (out.is_floating_point() or out.is_complex()):
            self.mark(makers[-1], out, requires_grad=True)
            makers = (*makers, self.graph.call_function(torch.detach, (makers[-1],)))
        memory = self._memories.get(storage_key(out))
        base = None
        if memory is not None:
            base = next((c for t in call.inputs if (c := self._cells.get(id(t))) and c.memory is memory), None)
        if base is None:
            self.bind(out, makers[-1])
            return
        cell = Cell(out, makers[-1], base.memory, base=base, base_node=base.node, makers=makers, how=call.how)
        cell.piece, cell.seen = piece, base.memory.writes
        self._cells[id(out)] = cell
        self.mark(makers[-1], out)

    def bind(self, tensor: Tensor, node: fx.Node) -> None:
        """Let `tensor`, which is no view, hold the value of `node`."""
        memory = self._memory(tensor)
        self._cells[id(tensor)] = Cell(tensor, node, memory, seen=memory.writes)
        self.mark(node, tensor)

    def _memory(self, tensor: Tensor) -> Memory:
        memory = self._memories.setdefault(storage_key(tensor), Memory())
        memory.bases += 1
        return memory

    def mark(self, node: fx.Node, tensor: Tensor, requires_grad: bool | None = None) -> None:
        """Write the facts of a node that makes a tensor like `tensor`."""
        value = value_of(tensor)
        if requires_grad is not None:
            value = replace(value, requires_grad=requires_grad)
        facts.put(node, self.here(), value)

    def from_function(self, tensor: Tensor, inputs: list[Tensor]) -> None:
        """Mark a result of an autograd.Function: whether it carries a gradient is known only after apply returns."""
        self._cells[id(tensor)].from_function = tuple(inputs)

    # ---- writes

    def settle(self, tensor: Tensor) -> None:
        """Let autograd see what it must know of the tensor, and of what it is a view of, before a write."""
        cell = self._cells.get(id(tensor))
        while cell is not None:
            self.results.settle(cell.tensor)
            cell = cell.base

    def write(self, tensor: Tensor, node: fx.Node) -> None:
        """`tensor` was written in place and now holds the value of `node`; so do its bases, through it."""
        cell = self._cells[id(tensor)]
        chain = [cell]
        while (base := chain[-1].base) is not None:
            chain.append(base)
        olds = [self.fresh(one) for one in chain]
        if cell.memory.bases > 1:
            raise self.error(
                "it writes in place into memory that two tensors of the model share", "give each tensor its own memory"
            )
        if not torch.is_grad_enabled() and any(one.tensor.requires_grad for one in chain):
            raise self.error(
                "it writes in place, outside autograd, into a tensor that carries a gradient",
                "compute a new tensor, or write into a detached clone",
            )
        cell.memory.writes += 1
        self._set(cell, node)
        for view, base, old in zip(chain, chain[1:], olds[1:], strict=False):
            self._set(base, self._scatter(view, base)(self.graph, old, view.node))

    def _set(self, cell: Cell, node: fx.Node) -> None:
        cell.node, cell.seen = node, cell.memory.writes
        if facts.get(node, Value) is None:
            self.mark(node, cell.tensor)

    def _scatter(self, view: Cell, base: Cell) -> views.Scatter:
        how = view.how
        if view.piece is None:
            way = views.scatter_for(how.name, base.tensor, view.tensor, how.args, how.kwargs)
        else:
            way = views.piece_scatter(how.name, view.piece[1], view.piece[0], how.args, how.kwargs)
        if way is None:
            line = places.describe(facts.origin(view.node))
            raise self.error(
                f"it writes in place through the result of '{how.name}' ({line}), which changes another tensor in "
                "a way no graph can hold",
                "write into the tensor itself, or make a new tensor instead of writing in place",
            )
        return way

    def reshaped(self, tensor: Tensor, before: Tensor, node: fx.Node, how: How) -> None:
        """`tensor` itself changed its shape (`unsqueeze_`): it becomes a view of what it was, `before`."""
        old = self._cells[id(tensor)]
        base = replace(old, tensor=before)
        cell = Cell(tensor, node, old.memory, base=base, base_node=old.node, makers=(node,), how=how, seen=old.seen)
        self._cells[id(tensor)] = cell
        self.mark(node, tensor)

    def rebind(self, tensor: Tensor, node: fx.Node) -> None:
        """`tensor` holds the value of `node` from now on; nothing that shares its memory changes."""
        self._cells[id(tensor)].node = node
        self.mark(node, tensor)

    def finish(self) -> None:
        """Settle what is known only at the end."""
        for cell in self._cells.values():
            if cell.from_function:
                self._check_detached(cell)
