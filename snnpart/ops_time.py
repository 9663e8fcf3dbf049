"""Operations over all steps of a time loop, which `fold-time` puts in the place of T copies of the loop's body.

- `Loop`: a part of the body that must run step after step (neuron state, recurrent weights), as one node that holds the
  body as a graph of its own. The user's surrogates and neuron layers run in it unchanged, T times.
- `batch_norm_steps`: a BatchNorm layer called at every step: statistics per step, T updates of the running ones.
- `batch_norm_repeated`: the same on an input that is equal at every step.

Layouts: *stacked* values are [T, N, ...], *merged* ones [T*N, ...] with time outside.

The form of a loop:

    body(*steps of the sequences, *fixed, *carried) -> (*carried for the next step, *results)
    first                                              the same for step 0, where step 0 differs (None: it does not)

A result is kept of `"all"` steps, stacked, or of the `"last"` step.

A loop may take several steps at a time, in rounds (`together`): its body is then a network over `together` steps, whose
own loops go on from round to round where they left off. `first` is then a first round of fewer steps, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from snnpart import ops
from snnpart.errors import LaunchError
from snnpart.shared_statistics import track

AT_ONCE_BYTES = 4 * 2**20
"""Of a step's input: on a GPU one norm over all steps saves their launches and costs copies, which weigh more from
here. On a CPU the steps stay in the cache, and T calls are cheaper at any size."""

Keep = Literal["all", "last"]
Step = Callable[..., tuple[Any, ...]]


class Nested:
    """A target that holds graphs of its own, whose neuron layers are called by their path."""

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The graphs inside."""
        raise NotImplementedError

    def nodes(self) -> Iterator[fx.Node]:
        """Every node of the graphs inside."""
        for graph in self.graphs:
            yield from graph.nodes

    def over(self, bind: Callable[[fx.Graph], Step]) -> Callable[..., Any]:
        """The target as a function whose neuron layers are those `bind` knows."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Loop(Nested):
    """Runs `body` `steps` times. Call it with three tuples: sequences [T, ...], fixed values, and first carried ones.

    It returns a tuple with one tensor for each entry of `keep`. Neuron layers in the body are called by their path, so
    whoever runs the graph calls `over(bind)` of it, where `bind` makes a function over his modules out of a graph.

    With `together` the body takes as many steps [together, ...] of each sequence, and returns results of them; it
    carries nothing itself. Where `together` does not divide `steps`, `first` takes the steps that are over, before all
    others.
    """

    body: fx.Graph
    steps: int
    keep: tuple[Keep, ...]
    first: fx.Graph | None = None
    together: int = 0

    def __post_init__(self) -> None:
        ops.name_target(self, "loop", __name__)

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The graph of an ordinary step (or round), and that of the first one where it differs."""
        return (self.body,) if self.first is None else (self.body, self.first)

    def over(self, bind: Callable[[fx.Graph], Step]) -> Callable[..., tuple[Tensor, ...]]:
        """The loop as a function whose neuron layers are those `bind` knows."""
        body = bind(self.body)
        first = body if self.first is None else bind(self.first)
        return lambda sequences, fixed, carried: run_steps(self, body, first, sequences, fixed, carried)[0]

    def joined_rounds(self, rounds: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """The loop's results of those of its rounds."""
        kept = zip(self.keep, zip(*rounds, strict=True), strict=True)
        return tuple(torch.cat(found) if keep == "all" else found[-1] for keep, found in kept)

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        raise LaunchError("a loop was called outside its network", fix="run the graph through Body.bind")


def run_steps(
    loop: Loop, body: Step, first: Step, sequences: Sequence[Tensor], fixed: Sequence[Any], carried: Sequence[Any]
) -> tuple[tuple[Tensor, ...], Sequence[Any]]:
    """The loop's results, and what it carries beyond its last step."""
    steps = [apart(sequence) for sequence in sequences]
    count = len(carried)
    results: list[list[Tensor]] = [[] for _ in loop.keep]
    for t in range(loop.steps):
        out = (body if t else first)(*(step[t] for step in steps), *fixed, *carried)
        carried = out[:count]
        for kept, keep, value in zip(results, loop.keep, out[count:], strict=True):
            if keep == "all" or t == loop.steps - 1:
                kept.append(value)
    made = tuple(joined(kept) if keep == "all" else kept[0] for kept, keep in zip(results, loop.keep, strict=True))
    return made, carried


def apart(sequence: Tensor) -> Sequence[Tensor]:
    """The steps of [T, ...], as views also where backward goes through them."""
    return (sequence.squeeze(0),) if sequence.shape[0] == 1 else sequence.unbind(0)


def joined(steps: Sequence[Tensor]) -> Tensor:
    """[T, ...] of its steps; of a single one a view."""
    return steps[0].unsqueeze(0) if len(steps) == 1 else torch.stack(list(steps))


def all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Every node of a graph and of the graphs that its nodes hold."""
    for node in graph.nodes:
        yield node
        if isinstance(node.target, Nested):
            for inner in node.target.graphs:
                yield from all_nodes(inner)


def leaf_paths(node: fx.Node) -> tuple[str, ...]:
    """The leaves that a node calls: that of a `call_module`, or those in the graphs that it holds."""
    if node.op == "call_module":
        return (str(node.target),)
    if isinstance(node.target, Nested):
        return tuple(dict.fromkeys(path for inner in node.target.nodes() for path in leaf_paths(inner)))
    return ()


def batch_norm_steps(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    steps: int,
) -> Tensor:
    """`ops.batch_norm` at each of `steps` steps of x [T*N, C, ...], time outside, in one result of that shape.

    With batch statistics every step has its own, and the running ones are updated T times in order; otherwise it is one
    call.
    """
    rest = (weight, bias, running_mean, running_var, num_batches_tracked, training, momentum, eps)
    if not training and running_mean is not None:
        return ops.batch_norm(x, *rest)
    if steps == 1:
        return ops.batch_norm(x, *rest)
    if x.device.type != "cpu" and x.nbytes <= steps * AT_ONCE_BYTES and training and momentum is not None:
        return batch_norm_at_once(x, *rest[:6], momentum, eps, steps)
    return torch.cat([ops.batch_norm(step, *rest) for step in x.unflatten(0, (steps, -1)).unbind(0)])


def batch_norm_at_once(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    steps: int,
) -> Tensor:
    """`batch_norm_steps` with batch statistics in one call: every step's channels beside the others', [N, T*C, ...].

    The T updates of the running statistics are one weighted sum over the steps.
    """
    channels = x.shape[1]
    beside = x.unflatten(0, (steps, -1)).transpose(0, 1).flatten(1, 2)
    means, variances = (
        None if kept is None else kept.new_zeros(steps * channels) for kept in (running_mean, running_var)
    )
    scale, shift = (None if value is None else value.repeat(steps) for value in (weight, bias))
    y = ops.batch_norm(beside, scale, shift, means, variances, None, training, 1.0, eps)
    with torch.no_grad():
        if num_batches_tracked is not None:
            num_batches_tracked.add_(steps)
        for kept, found in ((running_mean, means), (running_var, variances)):
            if found is not None:
                track(kept, found.unflatten(0, (steps, channels)), momentum)
    return y.unflatten(1, (steps, channels)).transpose(0, 1).flatten(0, 1)


def batch_norm_repeated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    steps: int,
) -> Tensor:
    """`ops.batch_norm` of an x [N, C, ...] that is the same at each of `steps` steps, whose results are equal.

    In training mode the running statistics and the counter end as after `steps` calls.
    """
    rest = (running_mean, running_var, num_batches_tracked, training, momentum, eps)
    if training and running_mean is not None:
        with torch.no_grad():
            for _ in range(steps - 1):
                ops.batch_norm(x.detach(), None, None, *rest)
    return ops.batch_norm(x, weight, bias, *rest)


TIME_OPS = (batch_norm_steps, batch_norm_repeated)
