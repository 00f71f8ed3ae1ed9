"""Few queries, whose keys are split among programs: ragged shapes, groups of heads, and maxima far apart."""

import dataclasses

import pytest
import torch

from ch14 import attention
from ch14.attention import AttentionConfig
from ch14.attention.configs import best_config
from tilelab.measure import check
from tilelab.runtime import device

pytestmark = pytest.mark.skipif(device.current().has_tma, reason="experiments check it on a GPU")
SPLIT = AttentionConfig(16, 16, 4, 2, "split", splits=3)


def make_inputs(b, h, hk, s, t, d=64, dtype=torch.float16):
    shapes = (b, h, s, d), (b, hk, t, d), (b, hk, t, d)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def find_error(inputs, config=SPLIT, is_causal=False) -> float:
    """Return the error of one call, which must write each element of the output and none beside it."""
    wanted, (q, *_) = attention.spec(*inputs, is_causal=is_causal), inputs
    flat, touched = check.make_poisoned((q.numel() // q.shape[-1], q.shape[-1]), q.dtype, q.device)
    attention.attention(*inputs, is_causal=is_causal, out=flat.view(q.shape), config=config)
    assert not touched()
    return check.relative_error(flat.view(q.shape), wanted)


@pytest.mark.parametrize(
    "shape, splits, causal",
    [
        ((1, 1, 1, 1, 1), 3, False),  # one key, and fewer blocks of keys than splits
        ((2, 6, 2, 5, 70), 3, False),  # a group of three heads in four rows, ragged queries and keys
        ((2, 6, 2, 5, 70), 1, True),
        ((1, 4, 2, 9, 30), 3, True),  # the last split sees only hidden keys
        ((1, 20, 1, 2, 33), 2, False),  # a group of more heads than a tile has rows
    ],
)
def test_ragged_shapes_and_groups(shape, splits, causal):
    config = dataclasses.replace(SPLIT, splits=splits)
    assert find_error(make_inputs(*shape), config, causal) < check.TOLERANCE[torch.float16]


def test_features_of_128_in_bfloat16():
    inputs = make_inputs(1, 4, 2, 3, 40, 128, torch.bfloat16)
    assert find_error(inputs) < check.TOLERANCE[torch.bfloat16]


def test_maxima_far_apart_across_splits():
    """The scores of the three splits are about 200, -200 and 0; one split holds all the weight, or nearly all."""
    q, k, v = make_inputs(1, 2, 1, 2, 48)
    q[:], k[:] = 1, torch.randn(k.shape) / 8
    k[:, :, :16] += 25  # scaled by 1 / 8, 64 features of 25 make 200
    k[:, :, 16:32] -= 25
    for order in (slice(None), torch.arange(47, -1, -1)):
        assert find_error([q, k[:, :, order], v[:, :, order]]) < check.TOLERANCE[torch.float16]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN in the interpreter
def test_a_split_of_hidden_keys_has_no_weight():
    """All scores of the first split are -inf. A query that sees no key at all gets NaN, as in torch."""
    q, k, v = make_inputs(1, 2, 1, 2, 40)
    q[..., 0] = 1
    k[:, :, :16, 0] = -torch.inf
    assert find_error([q, k, v]) < check.TOLERANCE[torch.float16]
    k[..., 0] = -torch.inf
    assert attention.attention(q, k, v, config=SPLIT).isnan().all()


def test_strides_and_the_same_bits_each_time():
    q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in make_inputs(2, 4, 2, 3, 50))
    launch = attention.prepare(q, k, v, config=SPLIT)
    first = launch().clone()
    assert first.stride() == q.stride() and torch.equal(first, launch())
    assert check.relative_error(first, attention.spec(q, k, v)) < check.TOLERANCE[torch.float16]


def test_splits_are_for_the_split_kernel():
    says = "splits must be from 1 to 256, and 1 without kernel='split'; it is 2"
    with pytest.raises(ValueError, match=says):
        AttentionConfig(splits=2)
    with pytest.raises(ValueError, match="it is 300"):
        dataclasses.replace(SPLIT, splits=300)
    assert str(SPLIT) == "16×16 · 4 warps · 2 stages · split · 3 splits"


def test_the_face_splits_the_keys_of_few_queries():
    launch = attention.prepare(*make_inputs(1, 2, 1, 1, 300))
    assert launch.config.kernel == "split" and launch.config.splits > 1 and launch.chosen
    assert check.relative_error(launch(), attention.spec(*launch.run.args[:3])) < 2**-10


@pytest.mark.parametrize(
    "case, kernel, splits",
    [
        ((1, 32, 8, 1, 4096, 128, False), "split", 16),
        ((64, 32, 8, 1, 4096, 64, False), "split", 1),  # 512 tiles fill the GPU
        ((1, 64, 8, 64, 8192, 128, False), "split_hopper", 4),
        ((1, 24, 8, 300, 5000, 128, False), "split_hopper", 2),
        ((1, 32, 8, 64, 4096, 128, True), "plain", 1),  # a query sees at most 64 keys
        ((4, 16, 16, 4096, 4096, 128, False), "hopper", 1),
    ],
)
def test_the_model_chooses_a_kernel_and_splits(case, kernel, splits):
    config = best_config(case[5], "sm_90a", case)
    assert (config.kernel, config.splits) == (kernel, splits)
    elsewhere = best_config(case[5], "sm_100a", case)
    assert elsewhere.kernel == ("split" if case[3] <= 64 and not case[6] else "plain")
