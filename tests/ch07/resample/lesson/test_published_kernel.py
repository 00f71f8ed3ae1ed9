import pytest
import torch

from ch07 import resample
from ch07.resample.lesson import published_kernel
from ch07.resample.lesson.published_kernel import FLAWED_KERNELS, correct_kernel, written_share


@pytest.mark.parametrize(
    "kernel, share", list(zip((correct_kernel, *FLAWED_KERNELS.values()), (1, 0.04, 1, 96 / 99)))
)
def test_each_flaw_leaves_its_share_of_the_outputs(kernel, share):
    assert written_share(kernel, 3, 20, 33, 64) == pytest.approx(share, abs=0.001)


@pytest.mark.parametrize("kernel", [correct_kernel, *FLAWED_KERNELS.values()])
def test_only_the_correct_kernel_is_right(kernel):
    torch.manual_seed(0)
    given = torch.randn(3, 8, 64), torch.rand(3, 8).sort(1).values, torch.rand(3, 33)
    out = torch.full((3, 33, 64), float("nan"))
    kernel(*given, out)
    right = (out - resample.spec(*given)).abs().max() < 1e-5
    assert bool(right) == (kernel is published_kernel.correct_kernel)
