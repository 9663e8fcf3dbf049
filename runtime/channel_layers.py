"""Layers whose channels are shared by the ranks of a process group, for those who put a network together by hand.

Each is made from a whole layer (`source`), which is only read, and holds the rank's slice of its parameters.

    mode       input             output            collective
    colwise    whole             own channels      all-reduce of the input's gradient, backward
    rowwise    own channels      whole             all-reduce of the output, forward; the bias is added once

So a colwise layer, what works channel by channel (`ChannelShardBatchNorm*`, neurons), and a rowwise layer make a block
with one all-reduce each way. Channels need not divide evenly: the first ranks take one more. A grouped convolution is
cut between groups, colwise only. Gradients of parameters that every rank holds whole (a rowwise bias) are equal on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.errors import ConfigError
from snnpart.runtime.collectives import AllReduce, Axis, GradAllReduce

Mode = Literal["colwise", "rowwise"]
MODES = ("colwise", "rowwise")


def channel_range(total: int, rank: int, ranks: int, what: str) -> tuple[int, int]:
    """Start and stop of what a rank holds of `total` channels; ConfigError when there are fewer than ranks."""
    if total < ranks:
        raise ConfigError(f"{what}={total} is less than the {ranks} ranks of the process group", fix="use fewer ranks")
    share, more = divmod(total, ranks)
    start = rank * share + min(rank, more)
    return start, start + share + (rank < more)


def axis_of(group: dist.ProcessGroup | None) -> Axis:
    """The ranks of a process group as a mesh axis; None is this rank alone."""
    if group is None or dist.get_world_size(group) == 1:
        return Axis(None, 0, (0,))
    return Axis(group, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))


class _ChannelShard(nn.Module):
    """What all layers have: the rank's place, and the step mode `m`, in which the input has T and N in front."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, source: nn.Module, process_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.axis = axis_of(process_group)
        self.process_group, self.world_size = process_group, self.axis.size
        self.step_mode = getattr(source, "step_mode", "s")
        self.training = source.training

    def _hold(self, name: str, source: Tensor | None, start: int, stop: int, dim: int = 0) -> None:
        """The rank's slice of a parameter as its own parameter."""
        part = None if source is None else source.detach().narrow(dim, start, stop - start).clone()
        held = None if source is None else nn.Parameter(part, requires_grad=source.requires_grad)  # type: ignore[arg-type]
        self.register_parameter(name, held)

    def _steps(self, x: Tensor, forward: Callable[[Tensor], Tensor], dims: int) -> Tensor:
        """One step, or with [T, N, ...] all at once."""
        if self.step_mode == "s":
            return forward(x)
        if x.dim() != dims + 1:
            raise ConfigError(f"step_mode 'm' takes an input of {dims + 1} dims [T, N, ...], not {tuple(x.shape)}")
        y = forward(x.flatten(0, 1))
        return y.unflatten(0, x.shape[:2])


def _checked(mode: str) -> Mode:
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r} is not known", choices=MODES)
    return mode  # type: ignore[return-value]


class _ChannelShardConv(_ChannelShard):
    space: ClassVar[int]
    kind: ClassVar[type[nn.Module]]
    stride: Any
    padding: Any
    dilation: Any
    padding_mode: str

    def __init__(self, source: Any, process_group: dist.ProcessGroup | None, mode: Mode) -> None:
        if self.kind not in type(source).__mro__:
            raise ConfigError(
                f"{type(self).__name__} is made from a {self.kind.__name__}, not a {type(source).__name__}"
            )
        super().__init__(source, process_group)
        self.mode = _checked(mode)
        for name in ("stride", "padding", "dilation", "padding_mode", "in_channels", "out_channels", "kernel_size"):
            setattr(self, name, getattr(source, name))
        self._pads: tuple[int, ...] = tuple(source._reversed_padding_repeated_twice)
        self._slice(source)

    def _slice(self, source: Any) -> None:
        rank, ranks = self.axis.index, self.world_size
        if self.mode == "rowwise":
            if source.groups != 1:
                raise ConfigError(f"rowwise with groups={source.groups}: groups are not summed", choices=["colwise"])
            start, stop = channel_range(source.in_channels, rank, ranks, "in_channels")
            self.groups, self._inputs = 1, None
            self._hold("weight", source.weight, start, stop, 1)
            self._hold("bias", source.bias, 0, source.out_channels)
            return
        units = source.groups if source.groups > 1 else source.out_channels
        start, stop = channel_range(units, rank, ranks, "groups" if source.groups > 1 else "out_channels")
        outer, inner = source.out_channels // units, source.in_channels // source.groups
        self.groups = stop - start if source.groups > 1 else 1
        self._inputs = (start * inner, (stop - start) * inner) if source.groups > 1 else None
        self._hold("weight", source.weight, start * outer, stop * outer)
        self._hold("bias", source.bias, start * outer, stop * outer)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, ...], or [T, N, C, ...] in step mode "m"."""
        return self._steps(x, self._one, self.space + 2)

    def _one(self, x: Tensor) -> Tensor:
        if self.mode == "colwise":
            x = GradAllReduce.apply(x, self.axis) if self.world_size > 1 else x
            x = x if self._inputs is None else x.narrow(1, *self._inputs)
            return self._convolve(x, self.bias)
        y = self._convolve(x, None)
        y = AllReduce.apply(y, self.axis) if self.world_size > 1 else y
        return y if self.bias is None else y + self.bias.view(-1, *(1,) * self.space)

    def _convolve(self, x: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._pads, mode=self.padding_mode), 0
        function: Any = (F.conv1d, F.conv2d, F.conv3d)[self.space - 1]
        y: Tensor = function(x, self.weight, bias, self.stride, padding, self.dilation, self.groups)
        return y

    def extra_repr(self) -> str:
        return f"mode={self.mode}, in_channels={self.in_channels}, out_channels={self.out_channels}"


class ChannelShardConv1d(_ChannelShardConv):
    """A Conv1d whose channels are shared; `mode` as the module says."""

    space, kind = 1, nn.Conv1d


class ChannelShardConv2d(_ChannelShardConv):
    """A Conv2d whose channels are shared; `mode` as the module says."""

    space, kind = 2, nn.Conv2d


class ChannelShardConv3d(_ChannelShardConv):
    """A Conv3d whose channels are shared; `mode` as the module says."""

    space, kind = 3, nn.Conv3d


class ChannelShardLinear(_ChannelShard):
    """A Linear whose features are shared: x [..., features], in any step mode; `mode` as the module says."""

    def __init__(self, source: nn.Linear, process_group: dist.ProcessGroup | None, mode: Mode) -> None:
        if not isinstance(source, nn.Linear):
            raise ConfigError(f"ChannelShardLinear is made from a Linear, not a {type(source).__name__}")
        super().__init__(source, process_group)
        self.mode = _checked(mode)
        self.in_features, self.out_features = source.in_features, source.out_features
        size, what = (source.out_features, "out_features") if mode == "colwise" else (source.in_features, "in_features")
        start, stop = channel_range(size, self.axis.index, self.world_size, what)
        self._hold("weight", source.weight, start, stop, 0 if mode == "colwise" else 1)
        self._hold("bias", source.bias, *((start, stop) if mode == "colwise" else (0, source.out_features)))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features], whole or own, to [..., out_features], own or whole."""
        if self.mode == "colwise":
            return F.linear(GradAllReduce.apply(x, self.axis) if self.world_size > 1 else x, self.weight, self.bias)
        y = F.linear(x, self.weight)
        y = AllReduce.apply(y, self.axis) if self.world_size > 1 else y
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"mode={self.mode}, in_features={self.in_features}, out_features={self.out_features}"


class _ChannelShardBatchNorm(_ChannelShard):
    """Statistics are per channel: nothing is sent. `num_features` is the source's."""

    kind: ClassVar[type[nn.Module]]
    dims: ClassVar[tuple[int, ...]]
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    num_features: int
    eps: float

    def __init__(self, source: Any, process_group: dist.ProcessGroup | None) -> None:
        if self.kind not in type(source).__mro__:
            raise ConfigError(
                f"{type(self).__name__} is made from a {self.kind.__name__}, not a {type(source).__name__}"
            )
        super().__init__(source, process_group)
        self.num_features, self.eps, self.momentum = source.num_features, source.eps, source.momentum
        self.affine, self.track_running_stats = source.affine, source.track_running_stats
        start, stop = channel_range(source.num_features, self.axis.index, self.world_size, "num_features")
        self._hold("weight", source.weight, start, stop)
        self._hold("bias", source.bias, start, stop)
        for name in ("running_mean", "running_var"):
            held = getattr(source, name)
            self.register_buffer(name, None if held is None else held.detach()[start:stop].clone())
        counted = source.num_batches_tracked
        self.register_buffer("num_batches_tracked", None if counted is None else counted.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """The own channels in dim 1, or in dim 2 in step mode "m"."""
        return self._steps(x, self._one, x.dim() - 1 if x.dim() - 1 in self.dims else self.dims[-1])

    def _one(self, x: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        use_batch = self.training or self.running_mean is None
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, use_batch, factor, self.eps)

    def extra_repr(self) -> str:
        return f"num_features={self.num_features}"


class ChannelShardBatchNorm1d(_ChannelShardBatchNorm):
    """The own channels of a BatchNorm1d."""

    kind, dims = nn.BatchNorm1d, (2, 3)


class ChannelShardBatchNorm2d(_ChannelShardBatchNorm):
    """The own channels of a BatchNorm2d."""

    kind, dims = nn.BatchNorm2d, (4,)


class ChannelShardBatchNorm3d(_ChannelShardBatchNorm):
    """The own channels of a BatchNorm3d."""

    kind, dims = nn.BatchNorm3d, (5,)
