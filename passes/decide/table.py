"""The sharding table as one mapping from operations to their rules, and the question `rows_of`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from snnpart import ops
from snnpart.compat import WEIGHT_NORM
from snnpart.effects import DRAWN
from snnpart.facts import Sharded
from snnpart.ops_time import TIME_OPS, Loop
from snnpart.passes.decide import rules_local, rules_matrix, rules_norm, rules_shape
from snnpart.passes.decide.parts import is_bundle
from snnpart.passes.decide.rules import Ask, Declined, Row, Rule, checked
from snnpart.passes.decide.rules_loop import loop_rule

_REDUCTIONS = [
    "sum",
    "mean",
    "amax",
    "amin",
    "prod",
    "argmax",
    "argmin",
    "any",
    "all",
    "logsumexp",
    "nansum",
    "nanmean",
    "median",
    "max",
    "min",
]


def _function_rules() -> dict[Any, Rule]:
    table: dict[Any, Rule] = dict.fromkeys(rules_local.functions(rules_local.ELEMENTWISE), rules_local.elementwise)
    for name, space in rules_local.POOLS.items():
        table.update(dict.fromkeys(rules_local.functions([name]), partial(rules_local.pool, space=space)))
    table.update(dict.fromkeys(rules_matrix.MATRICES, rules_matrix.grouped))
    table.update(dict.fromkeys(rules_local.functions(DRAWN), rules_local.drawn))
    table.update(dict.fromkeys(rules_local.functions(_REDUCTIONS), rules_shape.reduce))
    table.update({F.interpolate: rules_local.resize, F.pad: rules_local.pad})
    table.update(dict.fromkeys((ops.batch_norm, ops.batch_norm_copies, *TIME_OPS), rules_local.batch_norm))
    table[ops.index_assign] = rules_shape.index_assign
    table.update(dict.fromkeys((torch.reshape, torch.flatten, torch.unflatten), rules_shape.reshape))
    table.update(
        {
            torch.permute: rules_shape.permute,
            torch.transpose: rules_shape.transpose,
            torch.movedim: rules_shape.movedim,
            torch.unsqueeze: rules_shape.unsqueeze,
            torch.squeeze: rules_shape.squeeze,
            torch.cat: rules_shape.cat,
            torch.stack: rules_shape.stack,
            torch.select: rules_shape.select,
            torch.unbind: rules_shape.select,
            operator.getitem: rules_shape.getitem,
            torch.matmul: rules_shape.matmul,
            torch.bmm: rules_shape.matmul,
        }
    )
    table.update({f: partial(rules_shape.along, position=1) for f in (torch.softmax, torch.log_softmax, torch.cumsum)})
    table.update({f: partial(rules_shape.along, position=1) for f in (torch.narrow, torch.index_select)})
    table[torch.flip] = partial(rules_shape.along, position=1, name="dims")
    table[torch.roll] = partial(rules_shape.along, position=2, name="dims")
    table.update({f: partial(rules_shape.along, position=2, default=-1) for f in (torch.topk, torch.diff)})
    table[torch.sort] = partial(rules_shape.along, position=1, default=-1)
    table[torch.repeat_interleave] = partial(rules_shape.along, position=2)
    table.update({f: partial(rules_shape.reduce, kept=3) for f in (torch.std, torch.var)})
    table[torch.norm] = partial(rules_shape.reduce, position=2, kept=3)
    table[torch.tile] = rules_shape.expand
    for space in (1, 2, 3):
        table[getattr(F, f"max_unpool{space}d")] = partial(rules_local.unpool, space=space)
    table.update(dict.fromkeys((torch.tril, torch.triu), rules_shape.last_two))
    table[F.glu] = rules_shape.gated
    table.update({F.unfold: rules_shape.unfold, F.grid_sample: rules_local.resize})
    table.update(dict.fromkeys((torch.split, torch.chunk), rules_shape.sections))
    table.update(_norm_rules())
    return table


def _norm_rules() -> dict[Any, Rule]:
    both = rules_local.functions
    return {
        **dict.fromkeys(both(["layer_norm", "rms_norm"]), rules_norm.layer_norm),
        **dict.fromkeys(both(["group_norm"]), rules_norm.group_norm),
        **dict.fromkeys(both(["instance_norm"]), rules_norm.instance_norm),
        **dict.fromkeys(both(["prelu"]), rules_norm.prelu),
        **dict.fromkeys(both(["pixel_shuffle"]), partial(rules_norm.shuffle, up=True)),
        **dict.fromkeys(both(["pixel_unshuffle"]), partial(rules_norm.shuffle, up=False)),
        F.normalize: rules_norm.normalize,
        F.scaled_dot_product_attention: rules_norm.attention,
        torch.einsum: rules_norm.einsum,
        WEIGHT_NORM: rules_norm.weight_norm,
    }


FUNCTIONS: Mapping[Any, Rule] = _function_rules()
METHODS: Mapping[str, Rule] = {
    **dict.fromkeys(rules_local.ELEMENTWISE_METHODS, rules_local.elementwise),
    "expand": rules_shape.expand,
    "repeat": rules_shape.expand,
}


def rule_of(node: fx.Node) -> Rule | None:
    """The rule by which the node follows its inputs; None for an operation that is not in the table."""
    if node.op == "call_module":
        return rules_local.leaf
    if node.op == "call_method":
        return METHODS.get(str(node.target))
    if node.op != "call_function":
        return None
    if isinstance(node.target, ops.Surrogate):
        return rules_local.surrogate
    if isinstance(node.target, Loop):
        return loop_rule(follow)
    if is_bundle(node):
        return rules_shape.bundle
    return FUNCTIONS.get(node.target)


def follow(node: fx.Node, ask: Ask) -> Row:
    """The row in which the node stays on its inputs' lane; Declined when it has none."""
    rule = rule_of(node)
    if rule is None:
        raise Declined(f"{_name(node)} is not in the sharding table")
    return _hooked(node, checked(node, rule(node, ask)), ask)


def _hooked(node: fx.Node, found: Row, ask: Ask) -> Row:
    """The row, if no tensor of which a rank has a part of the gradient has a hook that expects the whole."""
    for name in _in_parts(node, found, ask) if ask.hooked else ():
        raise Declined(f"'{name}' has a gradient hook, which expects the whole gradient")
    return found


def _in_parts(node: fx.Node, found: Row, ask: Ask) -> Iterator[str]:
    """Hooked tensors of which a rank has a part of the gradient: all of a leaf's, which sees its own channels only."""
    for index, (source, spread) in enumerate(zip(node.all_input_nodes, found.inputs, strict=True)):
        if source.op == "get_attr" and source.target in ask.hooked:
            yield from (str(source.target),) if isinstance(spread, Sharded) or index in found.partial else ()
    if node.op == "call_module":
        own = f"{node.target}."
        names = {name: ask.graph.tensors[name].names for name in ask.hooked}
        yield from (name for name, known in names.items() if any(n.startswith(own) for n in known))


_MATRIX_RULES: Mapping[str, Rule] = {
    "column": rules_matrix.column,
    "row": rules_matrix.row_parallel,
    "scatter": rules_matrix.scatter,
}


def matrix_rows(node: fx.Node, ask: Ask) -> tuple[dict[str, Row], dict[str, str]]:
    """The rows of a convolution or linear by rule, and why the others are not among them."""
    rows: dict[str, Row] = {}
    reasons: dict[str, str] = {}
    for name, rule in _MATRIX_RULES.items():
        try:
            rows[name] = _hooked(node, checked(node, rule(node, ask)), ask)
        except Declined as reason:
            reasons[name] = str(reason)
    return rows, reasons


def _name(node: fx.Node) -> str:
    return f"'{node.target}'" if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
