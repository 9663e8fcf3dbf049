"""What a kernel is for, by its name: a replayed CUDA graph says nothing else of it.

A group has a pattern that is looked for in names, and the tasks of the roofline that its kernels carry out; the first
group whose pattern is found takes the kernel. A group without tasks is what a step does beyond the roofline: sums for
BatchNorm, copies, additions of gradients. On the CPU operations stand for kernels, and a fused neuron runs as separate
operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from snnpart.roofline import Task, Work, total


@dataclass(frozen=True)
class Group:
    """Kernels with one purpose. `tasks`: what of the roofline they carry out."""

    name: str
    pattern: str
    tasks: tuple[Task, ...] = ()

    def takes(self, kernel: str) -> bool:
        return re.search(self.pattern, kernel, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Share:
    """Microseconds of a step that a group's kernels took, and those that its tasks need.

    `longest` is the kernel that took most of them, without the words that all kernels of torch begin with.
    """

    group: str
    measured: float
    least: float
    longest: str = ""


CUDA = (
    Group("communication", r"nccl"),
    Group("compiled by torch", r"^triton_"),
    Group("packing of bits", r"^_(un)?pack$"),
    Group("attention and matrix products",
          r"sdpa|flash|fmha|^(?!.*(fprop|dgrad|wgrad|conv)).*(gemm|gemv|nvjet|splitkreduce|cublas|\bdot_kernel)",
          ("product", "product gradients")),
    Group("convolution dgrad", r"dgrad|conv.*bwd_data|backward_data", ("convolution dgrad",)),
    Group("convolution wgrad", r"wgrad|conv.*bwd_filter|backward_filter", ("convolution wgrad",)),
    Group("layout, copies and casts",
          r"nhwc.{0,3}tonchw|nchw.{0,3}tonhwc|memcpy|_copy_kernel|copy_kernel|catarray|converttensor|transpose",
          ("weight casts",)),
    Group("convolution forward", r"fprop|convolve|conv2d|conv_depthwise|winograd|implicit_gemm", ("convolution",)),
    Group("statistics of norms", r"^_?(partial|final)_stats|batch_norm_(collect|reduce)_statistics|update_stats"),
    Group("fused neuron forward", r"^forward(_\w+)?$", ("neuron",)),
    Group("fused neuron backward", r"^backward(_\w+)?$", ("neuron backward",)),
    Group("norms", r"batch_norm|bn_fw|bn_bw|layer_norm|group_?norm|rowwisemoments", ("norm", "norm backward")),
    Group("pooling", r"pool", ("pool", "pool backward")),
    Group("optimizer", r"fused_?(adam|sgd)", ("optimizer",)),
    Group("gradient norm, clipping", r"multi_tensor_apply|lpnorm"),
    Group("loss", r"nll_loss|softmax|cross_entropy"),
    Group("sums", r"reduce_kernel|scan_kernel|over_programs"),
    Group("additions", r"functor_add|onself_add"),
    Group("fills", r"memset|fillfunctor"),
    Group("other kernels", r"", ("rest", "rest backward")),
)  # fmt: skip
"""Kernels of torch, cuDNN, cuBLAS, NCCL and our own, as profilers name them."""

CPU = (
    Group("communication", r"gloo|c10d::"),
    Group("optimizer", r"^optimizer", ("optimizer",)),
    Group("convolution backward", r"convolution_backward", ("convolution dgrad", "convolution wgrad")),
    Group("convolution forward", r"convolution|aten::.*conv\d?d", ("convolution",)),
    Group("matrix products", r"aten::(mm|addmm|bmm|baddbmm|linear|matmul|_scaled_dot)",
          ("product", "product gradients")),
    Group("norms", r"batch_norm|layer_norm|group_norm", ("norm", "norm backward")),
    Group("pooling", r"pool", ("pool", "pool backward")),
    Group("layout, copies and casts", r"aten::(copy_|clone|contiguous|to|_to_copy|cat|stack)$", ("weight casts",)),
    Group("fills and allocations", r"aten::(fill_|zero_|zeros|ones|empty|full|new_)"),
    Group("neurons and other operations", r"^aten::", ("neuron", "neuron backward", "rest", "rest backward")),
    Group("the host", r""),
)  # fmt: skip
"""torch's operations on the CPU."""


_NOISE = r"^void |at::native::|\(anonymous namespace\)::"


def group_of(kernel: str, groups: Sequence[Group]) -> Group:
    """The first group that takes the kernel; the last one takes every kernel."""
    return next(group for group in groups if group.takes(kernel))


def shares(kernels: Mapping[str, float], works: Iterable[Work], groups: Sequence[Group]) -> list[Share]:
    """What each group took and needs, in microseconds, the longest first, without groups of which there is nothing.

    Args:
        kernels: microseconds of a step by kernel name.
    """
    works, members = list(works), {group.name: dict[str, float]() for group in groups}
    for kernel, us in kernels.items():
        members[group_of(kernel, groups).name][kernel] = us
    found = [_share(group, members[group.name], works) for group in groups]
    return sorted((one for one in found if one.measured or one.least), key=lambda one: -one.measured)


def _share(group: Group, kernels: Mapping[str, float], works: Sequence[Work]) -> Share:
    least = total(works, *group.tasks) if group.tasks else 0.0
    longest = re.sub(_NOISE, "", max(kernels, key=lambda kernel: kernels[kernel], default=""))
    return Share(group.name, sum(kernels.values()), least, longest)
