"""Operations by kind, for the analyses: what an operation does with the dims and the numbers of its inputs.

A node's operation is known by its plain name (`add` for `torch.add` and for the method `add` alike), so that the
analyses also hold on graphs that were not canonicalized. What is in no list is `other`: the analyses then claim
nothing.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import fx

from snnpart.facts import Value, Values, get
from snnpart.ops import Surrogate

Kind = Literal[
    "elementwise", "view", "permute", "index", "join", "reduction", "conv", "linear", "matmul", "norm", "pool",
    "surrogate", "factory", "leaf", "tensor", "input", "same", "other",
]  # fmt: skip

_NAMES: dict[Kind, str] = {
    "elementwise": (
        "add sub rsub mul div floor_divide remainder fmod pow maximum minimum eq ne lt le gt ge logical_and "
        "logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not where clamp relu "
        "sigmoid tanh neg abs exp log log1p expm1 sqrt rsqrt reciprocal square sin cos atan erf sign floor ceil "
        "round positive detach clone to type_as contiguous channels_last dropout alpha_dropout feature_dropout "
        "feature_alpha_dropout dropout1d dropout2d dropout3d leaky_relu elu gelu silu mish hardtanh relu6 softplus "
        "hardsigmoid hardswish celu selu prelu logsigmoid softsign threshold lerp addcmul addcdiv masked_fill "
        "nan_to_num heaviside bernoulli isnan isinf isfinite zeros_like ones_like full_like rand_like randn_like "
        "all_reduce grad_all_reduce float double half bfloat16"
    ),
    "view": "reshape view flatten unflatten squeeze unsqueeze later",
    "permute": "permute transpose movedim t swapaxes",
    "index": "getitem select narrow chunk split unbind",
    "join": "cat stack",
    "reduction": "sum mean amax amin max min prod var std any all argmax argmin norm logsumexp",
    "conv": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    "linear": "linear",
    "matmul": "matmul bmm mm scaled_dot_product_attention",
    "norm": (
        "batch_norm batch_norm_copies batch_norm_steps batch_norm_repeated layer_norm group_norm instance_norm "
        "rms_norm softmax log_softmax normalize local_response_norm"
    ),
    "pool": (
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d interpolate pad"
    ),
    "factory": (
        "zeros ones full empty rand randn randint randperm arange linspace tensor as_tensor eye scalar_tensor "
        "new_zeros new_ones new_full new_empty"
    ),
    "same": "expand repeat roll flip index_assign shard all_gather reduce_scatter cumsum index_select gather",
}
_KIND_OF: dict[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}

_VIEW_NAMES = (
    "reshape view flatten unflatten squeeze unsqueeze permute transpose movedim t getitem select narrow chunk split "
    "unbind expand detach later"
)
VIEWS = frozenset(_VIEW_NAMES.split())
"""Operations that move no data (on the layouts they are used on)."""


def name_of(node: fx.Node) -> str:
    """The plain name of a node's operation; empty for classes and surrogates, whose names say nothing."""
    if isinstance(node.target, (Surrogate, type)):
        return ""
    return str(node.target) if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def kind_of(node: fx.Node) -> Kind:
    """The kind of a node's operation."""
    if node.op == "call_module":
        return "leaf"
    if node.op == "get_attr":
        return "tensor"
    if node.op == "placeholder":
        return "input"
    if isinstance(node.target, Surrogate):
        return "surrogate"
    return _KIND_OF.get(name_of(node), "other")


def value_of(item: Any) -> Value | None:
    """The Value of an argument that is a node which makes one tensor."""
    return get(item, Value) if isinstance(item, fx.Node) else None


def first_value(node: fx.Node) -> Value | None:
    """The node's Value, or that of its first result when it has several."""
    value, several = get(node, Value), get(node, Values)
    if value is not None or several is None:
        return value
    return next((item for item in several.items if isinstance(item, Value)), None)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The node's inputs that hold tensors, in order."""
    return [item for item in node.all_input_nodes if get(item, Value) is not None or get(item, Values) is not None]


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def layer_of(tensor: str) -> str:
    """The path of the layer that a tensor of the network is named for: its owner, or its own where a module has several
    that are not called `weight`."""
    owner, _, name = tensor.rpartition(".")
    return owner if owner and name == "weight" else tensor
