"""The decoder block: its arithmetic against float64, its quantisation, and its traces. No test here needs a GPU."""

from collections import Counter

import pytest
import torch
from cases import cases
from torch._subclasses import FakeTensorMode

from ch14 import attention, fp8_gemm
from ch14.compiled import decoder_block
from ch14.compiled.decoder_block import DecoderBlock, Sizes
from ch14.compiled.lesson import decoder_timing, experiments
from tilelab.measure import check
from tilelab.records import results
from tilelab.runtime import device

SMALL = Sizes(hidden=128, heads=4, kv_heads=2, head_dim=64, inner=256, most_tokens=64)


def spec(sizes, weights, x):
    """The block in float64, written with loops and without the block's own helpers."""
    weights, x = {name: weight.double() for name, weight in weights.items()}, x.double()
    tokens, half = x.shape[0], sizes.head_dim // 2

    def norm(x):
        return x / (x.square().mean(1, keepdim=True) + sizes.eps).sqrt()

    def rotate(head):
        pairs = torch.complex(head[:, :half], head[:, half:])
        angles = torch.outer(torch.arange(tokens), sizes.theta ** (-torch.arange(half).double() / half))
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), 1)

    heads = (norm(x) @ weights["qkv"].T).split(sizes.head_dim, 1)
    q, k = heads[: sizes.heads], heads[sizes.heads : sizes.heads + sizes.kv_heads]
    v, seen = heads[sizes.heads + sizes.kv_heads :], torch.ones(tokens, tokens, dtype=torch.bool).tril()
    found = []
    for h in range(sizes.heads):
        group = h * sizes.kv_heads // sizes.heads
        scores = rotate(q[h]) @ rotate(k[group]).T / sizes.head_dim**0.5
        found.append(scores.masked_fill(~seen, -torch.inf).softmax(1) @ v[group])
    x = x + torch.cat(found, 1) @ weights["out"].T
    both = norm(x) @ weights["gate_up"].T
    gate, up = both[:, : sizes.inner], both[:, sizes.inner :]
    return x + (gate / (1 + (-gate).exp()) * up) @ weights["down"].T


@pytest.mark.parametrize("tokens", [1, 16, 33])
@cases("dtype, limit", (torch.float32, 5e-6), (torch.bfloat16, 2**-5), (torch.float64, 1e-12))
def test_the_eager_block_computes_what_the_formulas_say(tokens, dtype, limit):
    weights = decoder_block.make_weights(SMALL, "cpu", dtype, std=0.1)
    x = torch.randn(2, tokens, SMALL.hidden).to(dtype)
    found = DecoderBlock(SMALL, weights)(x)
    assert found.dtype == dtype
    for result, row in zip(found, x):
        assert check.relative_error(result, spec(SMALL, weights, row)) < limit


def test_the_reference_is_float64():
    weights, x = decoder_block.make_weights(SMALL, "cpu"), torch.randn(1, 40, SMALL.hidden).bfloat16()
    (found,) = decoder_timing.make_references(SMALL, weights, [x])
    assert found.dtype == torch.float64
    assert check.relative_error(found[0], spec(SMALL, weights, x[0])) < 1e-12


def test_the_sizes_are_those_of_an_8_billion_parameter_model():
    parameters = sum(n * k for n, k in Sizes().weights.values())
    assert parameters == 218_103_808
    assert 32 * parameters + 2 * 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)  # 32 blocks, two embeddings
    found = Sizes().count_flops(4096)
    assert found == pytest.approx(2 * 4096 * parameters + 4 * 4096 * 4096**2 / 2, rel=1e-4)


@pytest.mark.parametrize("rows", [2, 16, 17, 130])
def test_quantised_layers_multiply_what_they_stand_for(rows):
    x, weight = torch.randn(rows, 256).bfloat16(), (torch.randn(384, 256) * 0.02).bfloat16()
    x[0] = 0
    (values, scales), (codes, blocks) = decoder_block.quantise_rows(x), decoder_block.quantise_weight(weight)
    assert (scales.shape, blocks.shape) == ((rows, 2), (3, 2)) and scales.T.is_contiguous()
    assert values.is_contiguous()
    found = fp8_gemm.spec(values, codes.T, scales, blocks.T)
    assert check.relative_error(found, x.double() @ weight.double().T) < 0.08 and not found[0].any()
    assert values.float().abs().max() == codes.float().abs().max() == decoder_block.E4M3_MAX


@pytest.mark.parametrize("tokens", [16, 17])
def test_the_course_s_attention_takes_few_tokens_with_grouped_queries(tokens):
    """The block's layout: heads beside each other in a row, so transposed views with gaps."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs without a GPU")
    rows = torch.randn(1, tokens, 8, 64).half()
    q, k, v = (part.transpose(1, 2) for part in rows.split((4, 2, 2), 2))
    found = decoder_block.attend_tiles(q, k, v)
    seen = check.relative_error(found, attention.spec(q, k, v, is_causal=True))
    assert seen < check.TOLERANCE[torch.float16]


@pytest.mark.compile
def test_every_variant_is_one_graph_without_breaks():
    """Fake tensors have a shape and no data. Only the graphs of unmarked calls grow with the number of tokens."""
    gemm = "wgmma_gemm" if device.current().has_wgmma else "gemm"
    expected = {
        "torch.compile": {},
        "course bf16": {gemm: 4, "attention": 1},
        "course fp8": {"fp8": 4, "attention": 1},
    }
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        weights = decoder_block.make_weights(decoder_block.LLAMA_3_8B, "cpu")
        for name, operators in expected.items():
            linear, attend, _ = decoder_timing.VARIANTS[name]
            block = DecoderBlock(decoder_block.LLAMA_3_8B, weights, linear, attend)
            for marked, graphs_after in ((True, [1, 1, 1]), (False, [1, 2, 2])):
                inputs = decoder_timing._make_inputs(decoder_block.LLAMA_3_8B, decoder_timing.CALLS, "cpu")
                torch._dynamo.reset()
                compiled, graphs = decoder_timing.compile_and_count(block, lambda graph, _: graph.forward)
                assert decoder_timing.count_graphs(compiled, graphs, inputs, marked) == graphs_after
            calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
            assert Counter(call.split(".")[1] for call in calls if call.startswith("tiles.")) == operators
    torch._dynamo.reset()


@pytest.mark.compile
def test_inputs_without_a_mark_use_the_graph_of_marked_ones():
    block = DecoderBlock(SMALL, decoder_block.make_weights(SMALL, "cpu"))
    torch._dynamo.reset()
    with torch.no_grad():
        function, graphs = decoder_timing.compile_and_count(block, lambda graph, inputs: graph.forward)
        inputs = [torch.randn(1, tokens, SMALL.hidden).bfloat16() for tokens in (40, 16, 17)]
        assert decoder_timing.count_graphs(function, graphs, [x.clone() for x in inputs], True) == [1, 1, 1]
        for x in inputs:
            assert torch.equal(function(x), block(x))
    assert len(graphs) == 1


def test_the_kernels_of_a_call_are_divided_by_kind():
    call = [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 30.0),
        ("specialised", 20.0),
        ("split", 10.0),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>(Params)",
            4.0,
        ),
        ("attention_hopper_kernel", 3.0),
        ("fp8_blocks", 5.0),
        ("Memset (Device)", 1.0),
        ("triton_poi_fused_add_attention_cat_mul_wgmma_gemm_1", 2.0),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(Params)", 6.0),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 4>(float*)", 1.0),
    ]
    expected = pytest.approx({"launches": 10, "products_ms": 0.071, "attention_ms": 0.007, "other_ms": 0.004})
    assert decoder_timing.divide_kernels(call * 2, 2) == expected
    assert decoder_timing.divide_kernels(call, 3) == decoder_timing.divide_kernels([], 3) == {}


def test_the_record_is_described():
    measured = {"ratio": 2.0, "spread": 0.01, "call_ratio": 1.5, "breaks": 0, "graphs": [1, 1, 1]}
    rows = [
        {"name": "eager", "tokens": 16, "status": "ok", "ms": 2.0},
        {"name": "course fp8", "tokens": 16, "status": "ok", "ms": 1.0, **measured},
        {"name": "course bf16", "tokens": 16, "status": "failed", "reason": "no such kernel"},
    ]
    kept = {"experiment": "ch14_compiled_decoder", "rows": rows, "recorded": "2026-01-01T00:00:00+00:00"}
    kept |= {"device": {"name": "NVIDIA H200", "capability": [9, 0]}}
    record = results.Record(kept, live=True, stale="")
    assert "course fp8" in str(experiments.tabulate_decoder(record))
