"""The table of kernels below a waterfall."""

import pytest

from steelyard.metrics.time_waterfall import Waterfall
from steelyard.record.profile_facts import KernelFacts
from steelyard.report.numbers import UNKNOWN
from steelyard.report.waterfall_page import build_kernel_table, shorten_kernel_name
from steelyard.words import PageWords


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            (
                "void at::native::vectorized_elementwise_kernel<8,"
                " at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >(int,"
                " at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
            ),
            "vectorized_elementwise_kernel<8, CUDAFunctor_add<BFloat16>, array<char*, 3ul> >",
        ),
        (
            (
                "void at::native::(anonymous"
                " namespace)::multi_tensor_apply_kernel<at::native::(anonymous"
                " namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous"
                " namespace)::FusedAdamMathFunctor<c10::B"
            ),
            "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFun…",
        ),
        ("void (anonymous namespace)::spin(int*, int)", "spin"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("aten::copy_", "aten::copy_"),
    ],
)
def test_kernel_names_lose_cpp_namespaces_and_arguments(name: str, shown: str) -> None:
    assert shorten_kernel_name(name) == shown


@pytest.mark.parametrize(
    ("size_bytes", "shown"), [(200, ["200.0", "20.0%"]), (1001, [UNKNOWN, UNKNOWN])]
)
def test_a_rate_above_the_bandwidth_is_unknown(size_bytes: int, shown: list[str]) -> None:
    waterfall = Waterfall(0, 1, 2.0, (), None, 1000e9)
    kernel = KernelFacts(name="gather", kind="other", calls=1, time_s=1e-9, size_bytes=size_bytes)
    [row] = build_kernel_table([kernel], waterfall, PageWords("en")).rows
    assert [cell.text for cell in row.cells[-2:]] == shown
