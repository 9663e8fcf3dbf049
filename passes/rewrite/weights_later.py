"""weights-later: gradients of weights are computed while the gradient of what their layers read is summed over tp.

Done on a stage's graph after all that looks at single operations, for convolutions and linear layers (`ops_later`) that
read the result of a collective whose backward sums over the ranks. What a weight is made of by views is moved before
that collective, where `later` must stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from snnpart import facts, ops
from snnpart.facts import Cost, Value
from snnpart.ops_later import PRODUCTS, WeightLater, later
from snnpart.passes.analyze.kinds import VIEWS, name_of

_HANDED_ON = VIEWS | {"contiguous", "channels_last"}


def put_weights_off(graphs: Sequence[fx.Graph]) -> None:
    """Do it to the graphs of a stage, one for each tp rank, in place. They keep the same nodes in the same order: none
    is changed where a rank has no channels of a layer, and so another node in its place."""
    if not any(node.target is ops.vacant for graph in graphs for node in graph.nodes):
        for graph in dict.fromkeys(graphs):
            weights_later(graph)


def weights_later(graph: fx.Graph) -> None:
    """Have the weights' gradients of a training graph put off beside sums over ranks, in place."""
    for sent in [node for node in graph.nodes if _sums_the_gradient(node)]:
        for reader in list(_readers(sent)):
            chain = _chain(reader.args[1])  # type: ignore[arg-type]
            if chain is not None:
                _put_off(reader, chain, sent)


def _sums_the_gradient(node: fx.Node) -> bool:
    partial = node.target is ops.all_gather and ops.gather_options(node)[1]
    return node.op == "call_function" and (partial or node.target is ops.grad_all_reduce)


def _readers(sent: fx.Node) -> Iterator[fx.Node]:
    """The layers that read what was sent as their x, also through views, and learn their weight."""
    for user in list(sent.users):
        if name_of(user) in _HANDED_ON:
            yield from _readers(user)
        elif user.op == "call_function" and user.target in PRODUCTS and user.args[0] is sent and _learns(user):
            yield user


def _learns(reader: fx.Node) -> bool:
    weight = reader.args[1] if len(reader.args) > 1 else None
    value = facts.get(weight, Value) if isinstance(weight, fx.Node) else None
    return value is not None and value.requires_grad


def _chain(weight: fx.Node) -> list[fx.Node] | None:
    """The tensor of the network and the views that make a weight of it, in order; None where more is done to it."""
    chain = [weight]
    while chain[0].op != "get_attr":
        if name_of(chain[0]) not in VIEWS or len(chain[0].all_input_nodes) != 1:
            return None
        chain.insert(0, chain[0].all_input_nodes[0])
    return chain


def _put_off(reader: fx.Node, chain: list[fx.Node], sent: fx.Node) -> None:
    order = {node: place for place, node in enumerate(reader.graph.nodes)}
    for node in chain:
        if order[node] > order[sent]:
            sent.prepend(node)
    with reader.graph.inserting_before(sent):
        own = reader.graph.call_function(later, (chain[-1],))
    own.meta = dict(chain[-1].meta)
    facts.put(own, Cost())
    reader.update_arg(1, own)
    reader.target = WeightLater(reader.target)  # type: ignore[arg-type]
