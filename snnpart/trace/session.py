"""One run of the model under all patches: from blank inputs to a finished fx graph.

With `time_steps=T` the module is called T times in the same run: an input with a time dim gives its slice of step t,
one without is given unchanged; every output is stacked over the steps along dim 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from snnpart import facts, ops
from snnpart.compat import compiled_functions_run_eagerly, shape_errors_unlogged
from snnpart.errors import ConfigError, SnnpartError, TraceError
from snnpart.frameworks import is_leaf, preserved, reset_state, tell_batch
from snnpart.graph import Assumption, LeafInfo, StateSlot
from snnpart.trace import places
from snnpart.trace.calls import ExampleCall
from snnpart.trace.flags import TrainingFlag
from snnpart.trace.leaves import Modules
from snnpart.trace.masked import Selected
from snnpart.trace.mode import RecordingMode
from snnpart.trace.modules import modules_recorded, where
from snnpart.trace.recorder import Recorder
from snnpart.trace.roots import Root, find_roots
from snnpart.trace.sizes import Comparisons, lengths_followed, plain
from snnpart.trace.states import Before, NewBuffer
from snnpart.trace.surrogates import functions_recorded


@dataclass(frozen=True)
class Request:
    """What to trace, apart from the batch size. `opened` are paths of leaves to trace through; `states` are buffers
    known to hold the state of one window."""

    model: nn.Module
    call: ExampleCall
    training: bool
    time_steps: int | None
    reset: Callable[[nn.Module], Any] | None
    opened: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()

    def stays_whole(self, module: nn.Module) -> bool:
        """Whether the module is a leaf that is not to be opened."""
        return is_leaf(module) and all(module is not self.model.get_submodule(path) for path in self.opened)


@dataclass(frozen=True)
class Recording:
    """What one run gave. `output_names` and the graph's output tuple go together.

    `buffers` are those that hold state; `held` got another tensor of the same shape, in which the batch size occurs.
    """

    batch: int | None
    graph: fx.Graph
    output_names: tuple[str, ...]
    out_spec: pytree.TreeSpec
    out_constants: dict[int, Any]
    roots: dict[int, Root]
    leaves: dict[str, LeafInfo]
    states: tuple[StateSlot, ...]
    buffers: frozenset[str]
    assumptions: tuple[Assumption, ...]
    specialised: bool
    carried: tuple[StateSlot, ...]
    held: frozenset[str]
    asked: Comparisons


def record(request: Request, batch: int | None) -> Recording:
    """Run the model once at this batch size; it is left as it was.

    Raises:
        TraceError: forward does something that no graph can hold, or fails.
    """
    try:
        return _record(request, batch, keep_flag=True)
    except FlagRefused:
        return _record(request, batch, keep_flag=False)


class FlagRefused(Exception):
    """A function of torch takes nothing but a bool where it was given `self.training`."""


def _record(request: Request, batch: int | None, keep_flag: bool) -> Recording:
    model = request.model
    with _usual_modes(), preserved(model):
        reset_state(model, request.reset, request.states)
        if batch is not None and request.call.batch not in (None, batch):
            tell_batch(model, batch, request.call.batch)
        recorder = Recorder(find_roots(model, request.stays_whole), request.training, keep_flag)
        modules = Modules(model, recorder, request.stays_whole)
        before = Before(model, modules.is_leaf)
        inputs = _placeholders(recorder, request.call, batch)
        with _patched(recorder, modules):
            out = _run(recorder, request, inputs)
        recorder.asked.open = False
        recorder.finish()
        with recorder.pause():
            carried = tuple(before.carried(batch)) if batch is not None else ()
            held = frozenset(before.held(batch)) if batch is not None else frozenset()
            states, buffers = _settle(recorder, before, request.states)
            names, spec, constants = _outputs(recorder, out)
    return Recording(
        batch, recorder.graph, names, spec, constants, recorder.roots, modules.called, states, buffers,
        tuple(recorder.assumptions.values()), recorder.specialised, carried, held, recorder.asked,
    )  # fmt: skip


@contextmanager
def _usual_modes() -> Iterator[None]:
    """Autograd on and autocast off, whatever the caller's modes."""
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _patched(recorder: Recorder, modules: Modules) -> Iterator[None]:
    with (
        compiled_functions_run_eagerly(),
        shape_errors_unlogged(),
        functions_recorded(recorder),
        modules_recorded(recorder, modules),
        lengths_followed(),
        RecordingMode(recorder),
    ):
        yield


def _placeholders(recorder: Recorder, call: ExampleCall, batch: int | None) -> list[Tensor]:
    with recorder.fakes:
        inputs = call.blank(batch)
    for info, tensor in zip(call.infos, inputs, strict=True):
        recorder.bind(tensor, recorder.graph.placeholder(info.name))
    return inputs


def _run(recorder: Recorder, request: Request, inputs: list[Tensor]) -> Any:
    try:
        if request.time_steps is None:
            args, kwargs = request.call.arguments(inputs)
            return request.model(*args, **kwargs)
        return _run_steps(request, inputs, request.time_steps)
    except SnnpartError:
        raise
    except Exception as error:
        if recorder.refused is not None:
            raise recorder.refused from error
        if isinstance(error, TypeError) and TrainingFlag.__name__ in str(error):
            raise FlagRefused from error
        origin = places.raised_at(where(recorder, error), error.__traceback__)
        raise TraceError(
            f"forward failed on tensors without data: {type(error).__name__}: {error}",
            where=places.describe(origin),
            fix="check that the model runs on the example inputs; code that needs data cannot be traced",
        ) from error


def _run_steps(request: Request, inputs: list[Tensor], steps: int) -> Any:
    outs = []
    for step in range(steps):
        now = [
            x if info.time_dim is None else x.select(info.time_dim, step)
            for info, x in zip(request.call.infos, inputs, strict=True)
        ]
        args, kwargs = request.call.arguments(now)
        outs.append(pytree.tree_flatten(request.model(*args, **kwargs)))
    (first, spec), last = outs[0], outs[-1][0]
    if any(other != spec for _, other in outs):
        raise ConfigError("the module's output has another structure at another step", fix="return the same at each")
    stacked = [
        torch.stack([leaves[i] for leaves, _ in outs], 0) if isinstance(leaf, Tensor) else last[i]
        for i, leaf in enumerate(first)
    ]
    return pytree.tree_unflatten(stacked, spec)


def _settle(recorder: Recorder, before: Before, known: frozenset[str]) -> tuple[tuple[StateSlot, ...], frozenset[str]]:
    """Write changed buffers back at the end of the graph; everything else that changed is state, some of it buffers."""
    states: list[StateSlot] = []
    buffers: set[str] = set()
    values: dict[str, fx.Node] = {}
    for root, node in recorder.written():
        if root.kind == "parameter":
            raise TraceError(
                f"forward writes into the parameter '{root.name}'",
                where=places.describe(facts.origin(node)),
                fix="keep what changes in a buffer",
            )
        if root.registered:
            values[root.name] = node
        else:
            states.append(_slot(root))
    for found in before.buffers(known):
        if isinstance(found, StateSlot):
            states.append(found)
            name = ".".join(part for part in (found.module, found.name) if part)
            buffers.add(name)
            recorder.assume("state", f"buffer '{name}' changes its shape: it is state, reset before every window")
        elif isinstance(found, NewBuffer):
            values[found.name] = recorder.node(found.after)
    for name, node in values.items():
        _assign(recorder, name, node)
    named = {(slot.module, slot.name) for slot in states}
    plain_slots = [slot for slot in before.slots() if (slot.module, slot.name) not in named]
    return (*states, *plain_slots), frozenset(buffers)


def _slot(root: Root) -> StateSlot:
    module, _, name = root.name.rpartition(".")
    return StateSlot(module, name, f"tensor{list(root.tensor.shape)}")


def _assign(recorder: Recorder, name: str, value: fx.Node) -> None:
    """`ops.assign` at the end. What read the buffer before reads a copy, as the write must not change it afterwards."""
    graph = recorder.graph
    read = next((n for n in graph.nodes if n.op == "get_attr" and n.target == name), None)
    if read is None:
        read = graph.create_node("get_attr", name)
        facts.put(read, *facts.every(value).values())
    elif read.users or read is value:
        with graph.inserting_after(read):
            copy = graph.call_function(torch.clone, (read,))
        facts.put(copy, *facts.every(read).values())
        read.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
        value = copy if value is read else value
    root = next(root for root in recorder.roots.values() if root.name == name)
    recorder.used[name] = root
    facts.put(graph.call_function(ops.assign, (read, value)), facts.origin(value))


def _outputs(recorder: Recorder, out: Any) -> tuple[tuple[str, ...], pytree.TreeSpec, dict[int, Any]]:
    """Close the graph; names, structure and constants of the output."""
    keyed, spec = pytree.tree_flatten_with_path(out)
    names: list[str] = []
    nodes: list[fx.Node] = []
    constants: dict[int, Any] = {}
    for position, (path, leaf) in enumerate(keyed):
        if isinstance(leaf, Tensor):
            keys = (str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
            names.append(".".join(("output", *keys)))
            nodes.append(recorder.node(leaf))
        elif isinstance(leaf, (int, float, str, bool, type(None))):
            constants[position] = plain(leaf)
        elif isinstance(leaf, Selected):
            leaf.refuse()
        else:
            raise TraceError(
                f"forward returns a {type(leaf).__name__}, which no graph can hold",
                fix="return tensors, numbers and None, in tuples, lists, dicts or named tuples",
            )
    if not nodes:
        raise TraceError("forward returns no tensor", fix="return at least one tensor")
    recorder.graph.output(tuple(nodes))
    return tuple(names), spec, constants
