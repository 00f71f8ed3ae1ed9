"""Flash attention against float64, and what it refuses."""

import functools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ch14 import attention
from ch14.attention import AttentionConfig
from ch14.attention.configs import HEAD_DIMS, best_config
from ch14.attention.lesson import experiments
from tilelab.measure import check
from tilelab.runtime import device

HERE = device.current()
DTYPE = torch.float16
SMALL = AttentionConfig(32, 16, 4, 2)


def case(b=1, h=2, hk=2, s=40, t=40, d=64):
    where = "cuda" if HERE.has_tma else "cpu"
    return [
        torch.randn(b, heads, length, d, device=where).to(DTYPE)
        for heads, length in ((h, s), (hk, t), (hk, t))
    ]


def test_spec_is_torchs_attention():
    q, k, v = (torch.randn(2, heads, 30, 64, dtype=torch.float64) for heads in (4, 2, 2))
    for causal in (False, True):
        wanted = attention.spec(q, k, v, is_causal=causal)
        peer = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        assert torch.allclose(wanted, peer)
        assert torch.equal(wanted, experiments.compute_reference(q, k, v, causal))
    assert not torch.allclose(attention.spec(q, k, v, scale=1.0), attention.spec(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape, dtype",
    [((1, 1, 1, 1, 1, 64), DTYPE), ((2, 6, 2, 33, 47, 64), DTYPE), ((1, 2, 1, 50, 17, 128), torch.bfloat16)],
    ids=str,
)
def test_attention(shape, dtype, causal):
    q, k, v = (each.to(dtype) for each in case(*shape))
    kept = [each.clone() for each in (q, k, v)]
    wanted = attention.spec(q, k, v, is_causal=causal)
    flat, touched = check.make_poisoned((q.numel() // q.shape[-1], q.shape[-1]), q.dtype, q.device)
    result = attention.attention(q, k, v, is_causal=causal, out=flat.view(q.shape), config=SMALL)
    assert result.data_ptr() == flat.data_ptr() and not touched()
    assert check.relative_error(result, wanted) < check.TOLERANCE[dtype]
    assert all(torch.equal(now, before) for now, before in zip((q, k, v), kept))


def test_large_scores_and_a_scale_of_ones_own():
    q, k, v = case(s=20, t=70)
    # Scores of whole numbers are exact, so that the largest scale cannot magnify a rounding error.
    for queries, keys, scale in ((40 * q, k, None), (40 * q, k, 0.5), (q.round(), k.round(), 2.0**20)):
        wanted = attention.spec(queries, keys, v, scale=scale)
        result = attention.attention(queries, keys, v, scale=scale, config=SMALL)
        assert check.relative_error(result, wanted) < 2**-9


def hide_keys(q, k, hidden):
    """Give the keys `hidden` a score of -inf, by an element of -inf that meets a positive one of every query."""
    q[..., 0] = q[..., 0].abs() + 1
    k[:, :, hidden, 0] = -math.inf


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN in the interpreter
@pytest.mark.parametrize(
    "causal, hidden", [(False, slice(0, 20)), (False, slice(18, 50)), (True, slice(0, 20))]
)
def test_blocks_of_scores_that_are_all_minus_infinity(causal, hidden):
    """The first or the last blocks of 16 keys have no weight. A query that sees no other key gets NaN, as in torch."""
    q, k, v = case(h=1, hk=1, s=40, t=50)
    hide_keys(q, k, hidden)
    result = attention.attention(q, k, v, is_causal=causal, config=SMALL)
    wanted = attention.spec(q, k, v, is_causal=causal)
    first = 20 if causal else 0
    assert check.relative_error(result[:, :, first:], wanted[:, :, first:]) < check.TOLERANCE[DTYPE]
    assert result[:, :, :first].isnan().all() and wanted[:, :, :first].isnan().all()


def test_transposed_tensors_are_taken_as_they_are():
    q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in case(2, 3, 3, 37, 37))
    assert not q.is_contiguous()
    result = attention.attention(q, k, v, is_causal=True, config=SMALL)
    assert check.relative_error(result, attention.spec(q, k, v, is_causal=True)) < 2**-9
    assert result.transpose(1, 2).is_contiguous()  # as torch's flash attention returns it
    assert attention.attention(q.contiguous(), k, v, config=SMALL).is_contiguous()


def test_no_queries_and_no_keys():
    q, k, v = case()
    launch = attention.prepare(q[:, :, :0], k, v)
    best = best_config(64, HERE.target if HERE.has_tma else None, (1, 2, 2, 0, 40, 64, False))
    assert launch().shape == (1, 2, 0, 64) and launch.config == best
    assert not attention.attention(q, k[:, :, :0], v[:, :, :0], config="plain").any()


def refused(message, *changes, error=ValueError, **options):
    q, k, v = case()
    given = {"q": q, "k": k, "v": v} | dict(changes)
    with pytest.raises(error, match=message):
        attention.attention(**given, **options)


def test_bad_input_gets_one_sentence():
    q, k, v = case()
    refused("q must be a tensor of 4 dimensions", ("q", q[0]))
    refused("k must be float16; it is float64", ("k", k.double()))
    refused("k and v must be", ("v", v[:, :, :-1]))
    refused("k and v must be", ("k", k.repeat(2, 1, 1, 1)), ("v", v.repeat(2, 1, 1, 1)))
    refused("64 or 128", *zip("qkv", (each[..., :32].contiguous() for each in (q, k, v))))
    refused("multiple of those of k", *zip("kv", (each.repeat(1, 2, 1, 1)[:, :3] for each in (k, v))))
    refused("strides", *zip("kv", (each[:, :1].expand(-1, 2, -1, -1) for each in (k, v))))
    for scale in (float("nan"), 0, -1, 1e29, "0.1", torch.tensor(0.1)):
        refused("2.-100 to 2.20", scale=scale)
    refused(
        "overlaps itself",
        out=torch.as_strided(torch.zeros(800, dtype=DTYPE, device=q.device), q.shape, (400, 200, 8, 1)),
    )
    refused("out must be 1 x 2 x 40 x 64", out=k[:, :, :5])
    refused("out lies in the memory of q", ("q", q), out=q)


@pytest.mark.skipif(HERE.has_tma, reason="without a GPU")
def test_the_interpreter_refuses_gluon():
    with pytest.raises(device.Unsupported, match="Gluon"):
        attention.attention(*case(), config="overlap")


@pytest.mark.gpu
def test_every_step_on_the_gpu():
    """Ragged shapes, also with more tiles than the GPU has SMs, in bf16 and fp16."""
    rows = experiments.check_correctness()
    assert rows and [row for row in rows if row["status"] != "ok"] == []


@pytest.mark.gpu
def test_split_keys_on_the_gpu():
    rows = experiments.check_splits()
    assert rows and [row for row in rows if row["status"] != "ok"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_scores_of_minus_infinity_in_every_step(d):
    """The plain kernel takes the first block of keys first, the hopper kernel the last."""
    q, k, v = case(1, 3, 3, 700, 700, d)
    hide_keys(q, k, slice(0, 300))
    hide_keys(q, k, slice(400, 700))
    for name, config in experiments.ladder_here(d).items():
        for causal in (False, True):
            result, wanted = (
                compute(q, k, v, is_causal=causal)[:, :, 300 * causal :]
                for compute in (functools.partial(attention.attention, config=config), attention.spec)
            )
            assert check.relative_error(result, wanted) < 2 * check.TOLERANCE[DTYPE], (name, causal)


@pytest.mark.gpu
def test_a_tile_too_large_is_a_sentence():
    q, k, v = (torch.randn(1, 1, 256, 128, device="cuda").bfloat16() for _ in range(3))
    with pytest.raises(device.Unsupported, match="cannot run on"):
        attention.attention(q, k, v, config=AttentionConfig(256, 256, 8, 4))


@pytest.mark.gpu
def test_a_new_thread_can_launch():
    q = torch.randn(1, 2, 300, 128, device="cuda").bfloat16()
    launch = attention.prepare(q, q, q)
    # Triton would encode the maps there before the thread has a CUDA context
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(launch).result(), launch())


def test_options_of_torch_that_the_kernel_lacks_are_named():
    q, _, _ = case()
    plain = attention.attention(q, q, q)
    assert torch.equal(attention.attention(q, q, q, attn_mask=None, dropout_p=0.0), plain)
    for run in (attention.attention, attention.prepare):
        says = "attention has no attn_mask, only is_causal: use torch's scaled_dot"
        with pytest.raises(ValueError, match=says):
            run(q, q, q, attn_mask=torch.ones(40, 40).bool())
        with pytest.raises(ValueError, match="attention has no dropout, so dropout_p must be 0.0; it is 0.1"):
            run(q, q, q, dropout_p=0.1)
    with pytest.raises(ValueError, match="is_causal must be True or False; it is a str"):
        attention.attention(q, q, q, is_causal="no")
