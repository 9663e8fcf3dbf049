"""Kernels by what they are for: names as profilers give them, and what stands beside a group's time."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from snnpart.api import parallelize
from snnpart.ops_fused import FusedNeuron
from snnpart.roofline import TASKS, Work
from snnpart.runtime import kernel_kinds
from snnpart.runtime.kernel_kinds import CPU, CUDA, Group, Share, group_of, shares
from snnpart.runtime.kernels import batch_stats, bits
from snnpart.runtime.kernels.neuron_code import Form, backward_source, forward_source
from tests.gpu import jobs_execution as gpu

NAMES = {
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1_execute_"
    "segment_k_off_kernel__5x_cudnn": "convolution forward",
    "sm90_xmma_dgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc__5x_cudnn": "convolution dgrad",
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816wgrad_optimized_bf16_128x128_32x4_nhwc_align8>(Params)":
    "convolution wgrad",
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x128_32x4_nhwc_align8>(Params)":
    "convolution forward",
    "void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1>(int, int)": "convolution forward",
    "void cudnn::ops::nhwcToNchwKernel<__nv_bfloat16, __nv_bfloat16, float>(Params)": "layout, copies and casts",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "attention and matrix products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(Params)": "attention and matrix products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3": "attention and matrix products",
    "_over_programs": "sums",
    "_max_pool_forward": "pooling",
    "_max_pool_backward": "pooling",
    "void at::native::(anonymous namespace)::max_pool_backward_nhwc<c10::BFloat16, float, int, int>(int)": "pooling",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
    "at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, "
    "at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>(float)": "optimizer",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)":
    "layout, copies and casts",
    "Memcpy DtoD (Device -> Device)": "layout, copies and casts",
    "Memset (Device)": "fills",
    "triton_red_fused__native_batch_norm_legit_2": "compiled by torch",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>(int)":
    "fills",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>(int)": "additions",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, sum_functor<float>, 4>>(int)": "sums",
    "void at::native::batch_norm_backward_elemt_channels_last_kernel<4, c10::BFloat16>(int)": "norms",
    "void at::native::batch_norm_collect_statistics_channels_last_kernel<Var, c10::BFloat16>(int)":
    "statistics of norms",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*)": "loss",
    "void at::native::vectorized_elementwise_kernel<4, at::native::sqrt_kernel_cuda>(int)": "other kernels",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_libraries_are_known(name: str) -> None:
    assert group_of(name, CUDA).name == NAMES[name]


def test_our_own_kernels_are_known_by_the_names_they_are_written_with() -> None:
    x, _ = gpu.batch(0)
    program = parallelize(gpu.make_net(), example_inputs=x, input_layout="NCHW", time_steps=2, verify="off", fuse=True)
    fused = next(n.target for n in program.compiled.stages[0, 0].graph.nodes if isinstance(n.target, FusedNeuron))
    step: Any = fused.recorded
    form = Form(fused.steps, True, True, True, False, (False,) * len(step.parameters), (True,) * len(step.parameters))
    forward, backward = forward_source(step, form), backward_source(step, form, write=True, reduce=True)
    names = [re.match(r"def (\w+)", text)[1] for text in (forward, backward)]  # type: ignore[index]
    assert [group_of(name, CUDA).name for name in names] == ["fused neuron forward", "fused neuron backward"]
    assert {group_of(kernel.__name__, CUDA).name for kernel in (bits._pack, bits._unpack)} == {"packing of bits"}
    for kernel in (batch_stats._partial_stats, batch_stats._final_stats):
        assert group_of(kernel.__name__, CUDA).name == "statistics of norms"


@pytest.mark.parametrize("groups", [CUDA, CPU], ids=["cuda", "cpu"])
def test_every_task_is_in_one_group_and_the_last_group_takes_all(groups: tuple[Group, ...]) -> None:
    assert Counter(task for group in groups for task in group.tasks) == Counter(TASKS)
    assert group_of("anything", groups) is groups[-1]


def test_shares_are_what_groups_took_beside_what_they_need() -> None:
    works = [Work("neuron", "sn1", 0.0, 8.0, 3.0), Work("neuron", "sn2", 0.0, 8.0, 2.0), Work("pool", "p", 0, 8, 1.0)]
    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"
    found = shares({"forward": 9.0, fill: 1.0, "forward_1": 1.0}, works, kernel_kinds.CUDA)
    neuron = Share("fused neuron forward", 10.0, 5.0, "forward")
    fills = Share("fills", 1.0, 0.0, "vectorized_elementwise_kernel<4, FillFunctor<float>>(int)")
    assert found == [neuron, fills, Share("pooling", 0.0, 1.0)]
