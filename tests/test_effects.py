"""Which nodes have effects: judged by operation, in every way it can be written."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from snnpart import effects, ops


def call(op: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    return graph.create_node(op, target, (graph.placeholder("x"), *args), kwargs)


@pytest.mark.parametrize(
    ("op", "target", "in_place"),
    [
        ("call_method", "add_", True),
        ("call_method", "__iadd__", True),
        ("call_method", "__setitem__", True),
        ("call_method", "__invert__", False),
        ("call_method", "__add__", False),
        ("call_method", "add", False),
        ("call_function", torch.relu_, True),
        ("call_function", operator.and_, False),
        ("call_function", torch.relu, False),
    ],
)
def test_in_place(op: str, target: Any, in_place: bool) -> None:
    assert effects.is_in_place(call(op, target)) is in_place


def test_out_argument_is_in_place() -> None:
    assert effects.is_in_place(call("call_function", torch.add, 1, out=fx.Graph().placeholder("y")))


@pytest.mark.parametrize("target", [F.dropout, torch.dropout, torch.rand, torch.bernoulli, F.dropout2d])
def test_random(target: Any) -> None:
    assert effects.is_random(call("call_function", target)) and effects.has_effect(call("call_function", target))


def test_batch_norm_writes_only_when_it_tracks() -> None:
    graph = fx.Graph()
    x, mean = graph.placeholder("x"), graph.get_attr("bn.running_mean")
    tracks = graph.call_function(ops.batch_norm, (x, None, None, mean, None, None, True, 0.1, 1e-5))
    free = graph.call_function(ops.batch_norm, (x, None, None, None, None, None, True, 0.1, 1e-5))
    assert effects.has_effect(tracks) and not effects.has_effect(free)


@pytest.mark.parametrize("target", [ops.assign, ops.all_reduce, ops.grad_all_reduce])
def test_writes_and_messages(target: Any) -> None:
    assert effects.has_effect(call("call_function", target))


def test_plain_operations_have_none() -> None:
    assert not effects.has_effect(call("call_function", torch.add, 1))
    assert effects.has_effect(call("call_module", "sn1"))
