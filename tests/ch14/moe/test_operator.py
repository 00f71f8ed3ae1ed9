"""The grouped products, and the layer made of them, against float64, in the interpreter where there is no GPU."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from cases import cases
from planted import rarely
from sentences import refused
from torch.library import opcheck

from ch14 import moe
from ch14.moe.configs import SETS, GroupedConfig, best_config, job, parse, rejection
from tilelab.measure import check
from tilelab.runtime import build, device

GPU = device.current().capability is not None
WHERE = "cuda" if GPU else "cpu"
SMALL = GroupedConfig(64, 64, 32, 4, 2)
CONFIGS = [SMALL, dataclasses.replace(SMALL, epilogue_subtile=2), dataclasses.replace(SMALL, fused=True)]
FP8 = GroupedConfig(64, 64, 128, 4, 2)
ROUTINGS = {
    "ragged": [70, 0, 1, 64],
    "empty": [0, 0, 0, 0],
    "one has everything": [0, 0, 130, 0],
    "whole tiles": [64, 64, 0, 128],
}


@pytest.fixture
def small_tiles(monkeypatch):
    """Let "best" mean a small tile, which takes the interpreter less time."""
    for key in (("bf16", False), ("bf16", True)):
        monkeypatch.setitem(SETS, key, [SMALL])


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=WHERE).to(dtype)


def make_offsets(sizes):
    return torch.tensor(sizes, device=WHERE).cumsum(0).int()


def quantise(x, rows):
    """Return float8 numbers (..., R, C) and a scale for each `rows` x 128 of them, the last rows incomplete."""
    count = -(-x.shape[-2] // rows)
    whole = F.pad(x.float(), (0, 0, 0, count * rows - x.shape[-2]))
    scales = whole.unflatten(-2, (count, rows)).unflatten(-1, (-1, 128)).abs().amax((-3, -1)) / 448
    values = x.float() / scales.repeat_interleave(rows, -2).repeat_interleave(128, -1)[..., : x.shape[-2], :]
    return values.to(torch.float8_e4m3fn), scales


def find_errors(out, wanted, sizes):
    """Return the error of the rows of all groups, after a check that other rows still hold their poison."""
    rows = sum(sizes)
    assert out[rows:].isnan().all()
    return check.relative_error(out[:rows], wanted[:rows]) if rows else 0.0


@cases(
    "config, routing",
    *((SMALL, name) for name in ROUTINGS),
    *((config, "ragged") for config in CONFIGS[1:]),
    *(rarely(config, name) for config in CONFIGS[1:] for name in ROUTINGS if name != "ragged"),
)
def test_rows_of_each_group_meet_its_matrix(config, routing):
    sizes = ROUTINGS[routing]
    a, weight, offsets = random(sum(sizes) + 3, 40), random(4, 72, 40), make_offsets(sizes)
    a[sum(sizes) :] = float("nan")
    for b in (weight.mT, weight.mT.contiguous())[: 2 if sizes[0] else 1]:
        out, find_damage = check.make_poisoned((len(a), 72), torch.bfloat16, WHERE)
        assert moe.grouped_gemm(a, b, offsets, out=out, config=config) is out
        error = find_errors(out, moe.spec(a, b, offsets), sizes)
        assert error < check.TOLERANCE[torch.bfloat16] and find_damage() == ""


@pytest.mark.parametrize(
    "wrong", [[30, 1000, 90], [-40, 20, 70], [40, -(2**31), 70], [2**31 - 1, 20, 50]],
    ids=["beyond", "negative", "smallest", "decreasing"],
)  # fmt: skip
def test_ends_outside_of_the_rows_write_nothing_there(wrong):
    a, weight = random(70, 40), random(3, 72, 40)
    out, find_damage = check.make_poisoned((70, 72), torch.bfloat16, WHERE)
    wrong = torch.tensor(wrong, dtype=torch.int32, device=WHERE)
    moe.grouped_gemm(a, weight.mT, wrong, out=out, config=SMALL)
    assert find_damage() == ""
    ends = [min(max(end, 0), 70) for end in wrong.tolist()]
    errors = [[1e9] * 70 for _ in ends]  # a row of two groups may hold the result of either
    for group, (begin, end) in enumerate(zip([0, *ends], ends)):
        for row in range(begin, end):
            errors[group][row] = check.relative_error(out[row], a[row].double() @ weight[group].double().T)
    assert max(map(min, zip(*errors))) < check.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "config", [FP8, GroupedConfig(128, 64, 128, 4, 2, halves=True)], ids=lambda config: config.name
)
def test_block_scales(config):
    sizes = ROUTINGS["ragged"]
    (a, scale_a), (weight, scale_b) = (
        quantise(random(sum(sizes) + 3, 256), 1),
        quantise(random(4, 136, 256), 128),
    )
    offsets = make_offsets(sizes)
    out, _ = check.make_poisoned((len(a), 136), torch.bfloat16, WHERE)
    wanted = moe.spec(a, weight.mT, offsets, scale_a, scale_b.mT)
    for scales in (scale_a, scale_a.T.contiguous().T):
        out.fill_(float("nan"))
        moe.grouped_gemm(a, weight.mT, offsets, scale_a=scales, scale_b=scale_b.mT, out=out, config=config)
        assert find_errors(out, wanted, sizes) < check.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_masked_layout_computes_the_rows_that_count(fp8):
    counts = torch.tensor([0, 70, 3, 64], dtype=torch.int32, device=WHERE)
    a, weight, scale_a, scale_b = random(4, 70, 128), random(4, 72, 128), None, None
    if fp8:
        (a, scale_a), (weight, scale_b) = quantise(a, 1), quantise(weight, 128)
        scale_b = scale_b.mT
    out = torch.full((4, 70, 72), float("nan"), dtype=torch.bfloat16, device=WHERE)
    config = FP8 if fp8 else SMALL
    moe.masked_grouped_gemm(a, weight.mT, counts, scale_a=scale_a, scale_b=scale_b, out=out, config=config)
    for group, count in enumerate(counts.tolist()):
        assert out[group, count:].isnan().all()
        scales = (scale_a[group], scale_b[group : group + 1]) if fp8 else ()
        wanted = moe.spec(a[group], weight[group : group + 1].mT, torch.tensor([count]), *scales)
        if count:
            assert check.relative_error(out[group, :count], wanted[:count]) < check.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("layout", ["k", "n"])
def test_gradients(layout, small_tiles):
    sizes = [30, 0, 34, 1]
    a, weight, offsets = random(68, 48), random(4, 40, 48), make_offsets(sizes)
    a[65:] = float("nan")  # rows of no group
    b = (weight.mT if layout == "k" else weight.mT.contiguous()).requires_grad_()
    gradient, a = random(68, 40), a.requires_grad_()
    gradient[65:] = float("nan")
    found = torch.autograd.grad(moe.grouped_gemm(a, b, offsets), (a, b), gradient)
    assert found[0][65:].eq(0).all() and found[1][1].eq(0).all() and found[1].stride() == b.stride()
    begin = 0
    for group, end in enumerate(offsets.tolist()):
        rows = slice(begin, end)
        begin = end
        of_a = gradient[rows].double() @ b[group].detach().double().T
        of_b = a[rows].detach().double().T @ gradient[rows].double()
        if of_a.numel():
            assert check.relative_error(found[0][rows], of_a) < check.TOLERANCE[torch.bfloat16]
        assert check.relative_error(found[1][group], of_b) < check.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("ends", [[-20, 10, 10, 50], [-20, 10, -(2**31), 50]])
def test_ends_outside_of_the_rows_add_nothing_to_a_gradient(ends, small_tiles):
    memory = torch.full((104, 32), float("nan"), dtype=torch.bfloat16, device=WHERE)
    rows = memory[32:72].fill_(1)
    weight = random(4, 24, 32).requires_grad_()
    offsets = torch.tensor(ends, dtype=torch.int32, device=WHERE)
    moe.grouped_gemm(rows, weight.mT, offsets).sum().backward()
    last = 40 - max(ends[2], 0)
    assert [each.unique().tolist() for each in weight.grad] == [[0], [10], [0], [last]]


# ---- the layer


def make_layer(fp8=False, tokens=21, hidden=128, inner=128, experts=4):
    x, up = random(tokens, hidden), random(experts, 2 * inner, hidden) / hidden**0.5
    down = random(experts, hidden, inner) / inner**0.5
    ids = torch.stack([torch.randperm(experts, device=WHERE)[:2] for _ in range(tokens)])
    ids[3, 1], ids[4] = -1, experts
    weights = torch.rand(tokens, 2, device=WHERE)
    weights[4] = float("nan")  # of no expert
    if not fp8:
        return (x, up, down, ids, weights), {}
    (up, of_up), (down, of_down) = quantise(up, 128), quantise(down, 128)
    return (x, up, down, ids, weights), {"scale_gate_up": of_up, "scale_down": of_down}


def compute_layer(x, up, down, ids, weights, scale_gate_up=None, scale_down=None, is_fused=True):
    def round_rows(rows):
        return rows if scale_gate_up is None else moe._dequantise(*quantise(rows, 1), 1)

    up, down = moe._dequantise(up, scale_gate_up, 128), moe._dequantise(down, scale_down, 128)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(up)):
        token, choice = torch.where(ids == expert)
        both = round_rows(x[token]).double() @ up[expert].T
        gate, value = (both if is_fused else both.bfloat16().double()).chunk(2, -1)
        result = round_rows(F.silu(gate) * value) @ down[expert].T
        out = out.index_add(0, token, weights[token, choice, None].double() * result)
    return out


@cases("fp8, is_fused", (False, True), (True, True), (True, False))
def test_a_layer_of_experts(fp8, is_fused, monkeypatch):
    monkeypatch.setattr(moe, "_is_fused", lambda *rule: is_fused)
    tensors, scales = make_layer(fp8)
    config = "best" if fp8 else SMALL
    out = moe.moe(*tensors, **scales, config=config)
    assert check.relative_error(out, compute_layer(*tensors, **scales, is_fused=is_fused)) < 2**-6
    assert out[4].eq(0).all()  # no expert was chosen
    assert moe.moe(tensors[0][:0], *tensors[1:3], *(each[:0] for each in tensors[3:]), **scales).shape == (
        0,
        128,
    )


def test_a_layer_learns(small_tiles):
    (x, up, down, ids, weights), _ = make_layer(inner=32, hidden=64)
    learned = [each.requires_grad_() for each in (x, up, down, weights)]
    exact = [each.detach().double().requires_grad_() for each in learned]
    found = torch.autograd.grad(moe.moe(x, up, down, ids, weights).float().square().sum(), learned)
    wanted = torch.autograd.grad(compute_layer(*exact[:3], ids, exact[3]).square().sum(), exact)
    for mine, right in zip(found, wanted):
        assert check.relative_error(mine, right) < 0.05
    moe.moe(x[:0], up, down, ids[:0], weights[:0]).sum().backward()
    assert up.grad.eq(0).all() and down.grad.eq(0).all()


@cases(
    "fp8, change, message",
    (True, {"x": (21, 192), "gate_up": (4, 256, 192), "down": (4, 192, 128)}, "multiples of 128"),
    (True, {"scale_down": (4,)}, "scale_down must be 4 x 1 x 1; it is 4"),
    (False, {"gate_up": (0, 256, 128), "down": (0, 128, 128)}, "gate_up must have at least one element"),
    (False, {"x": (21, 136)}, "gate_up must be experts x 2 I x 136"),
    (False, {"topk_weights": (21, 1)}, "topk_weights must be 21 x 2; it is 21 x 1"),
)
@pytest.mark.parametrize("learns", [False, True], ids=["", "learns"])
def test_a_bad_layer_is_one_sentence(fp8, change, message, learns):
    tensors, scales = make_layer(fp8)
    given = dict(zip(("x", "gate_up", "down", "topk_ids", "topk_weights"), tensors)) | scales
    given |= {name: given[name].new_empty(shape) for name, shape in change.items()}
    given["x"].requires_grad_(learns and not fp8)
    with refused(message):
        moe.moe(**given)


@cases(
    "fp8, config, message",
    (True, GroupedConfig(64, 128, 128, 4, 2), "does not fit fp8 with SwiGLU"),
    (True, GroupedConfig(64, 256, 64, 4, 2), "does not fit fp8 with SwiGLU"),
    (False, GroupedConfig(64, 64, 256, 4, 2), "does not fit bf16"),
)
def test_a_configuration_of_another_dtype_is_refused(fp8, config, message):
    tensors, scales = make_layer(fp8)
    with refused(message):
        moe.moe(*tensors, **scales, config=config)


# ---- torch


@pytest.mark.compile
@cases(
    "tests",
    ("test_schema", "test_faketensor"),
    rarely(("test_autograd_registration", "test_aot_dispatch_dynamic")),
)
def test_opcheck(tests, small_tiles):
    a, b, offsets = random(20, 32), random(2, 24, 32).mT, make_offsets([7, 13])
    tiles = torch.ops.tiles
    layer, _ = make_layer(tokens=5, hidden=32, inner=16)
    full = torch.tensor([9, 9], dtype=torch.int32, device=WHERE)
    calls = [(tiles.grouped_gemm, (a.requires_grad_(), b.requires_grad_(), offsets))]
    if "test_schema" in tests:
        calls += [
            (tiles.grouped_weight_gradient, (a.detach(), random(20, 24), offsets)),
            (tiles.masked_grouped_gemm, (random(2, 9, 32), random(2, 24, 32).mT, full)),
            (tiles.moe, layer),
        ]
    for op, arguments in calls:
        assert set(opcheck(op.default, arguments, test_utils=tests).values()) == {"SUCCESS"}, op


@pytest.mark.compile
def test_a_layer_is_one_graph_for_any_number_of_tokens(small_tiles):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe.moe, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (6, 9):
        layer, _ = make_layer(tokens=tokens, hidden=32, inner=16)
        assert torch.equal(compiled(*layer), moe.moe(*layer))
    assert counter.frame_count == 1


@cases(
    "change, message",
    (lambda a, b, o: (a, b[:, :32], o), "the inner extents differ"),
    (lambda a, b, o: (a, b, o.long()), "offsets must be int32; it is int64"),
    (lambda a, b, o: (a, b, o[:2]), "offsets must be 3; it is 2"),
    (lambda a, b, o: (a.half(), b, o), "a must be bfloat16 or float8_e4m3fn; it is float16"),
    (lambda a, b, o: (a, b[..., :60], o), "N must be a multiple of 8"),
    (lambda a, b, o: (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), o), "multiple of 128; K is 64"),
    (lambda a, b, o: (random(40, 68)[:, :64], b, o), "a row of a must take a multiple of 16 bytes"),
)
def test_a_bad_operand_is_one_sentence(change, message):
    with refused(message):
        moe.grouped_gemm(*change(random(40, 64), random(3, 64, 64).mT, make_offsets([10, 10, 20])))


def test_what_32_bits_cannot_count_is_refused():
    with refused("a has 2,147,483,648 rows; a kernel counts at most 2,147,418,112"):
        moe.grouped_gemm(random(1, 8).expand(2**31, 8), random(1, 8, 8).mT, make_offsets([0]))
    with refused("4,096 groups of up to 2,000,000,000 rows may need"):
        moe._require_few_tiles(
            SMALL, random(1, 8).expand(2_000_000_000, 8), random(1, 8, 8).expand(4096, 8, 8)
        )


def test_out_must_not_hold_the_offsets():
    memory = torch.zeros(40 * 64, dtype=torch.bfloat16, device=WHERE)
    with refused("out lies in the memory of offsets"):
        offsets, out = memory.view(torch.int32)[:3], memory.view(40, 64)
        moe.prepare(random(40, 64), random(3, 64, 64).mT, offsets, out=out)


def test_no_rows_launch_nothing():
    with refused("N must be a multiple of 8"):
        moe.grouped_gemm(random(0, 64), random(3, 44, 64).mT, make_offsets([0, 0, 0]))
    assert moe.grouped_gemm(random(0, 64), random(3, 64, 64).mT, make_offsets([0, 0, 0])).shape == (0, 64)
    counts, empty = make_offsets([0, 0, 0]), random(3, 0, 64)
    assert moe.masked_grouped_gemm(empty, random(3, 64, 64).mT, counts).shape == (3, 0, 64)


# ---- configurations


def test_an_h200_takes_the_first_tile_of_each_list_for_many_rows():
    for (dtype, swiglu), listed in SETS.items():
        assert best_config(1000, 4096, dtype, swiglu, "sm_90a") is listed[0]


def test_names_are_read_back():
    for config in moe.configs().values():
        assert parse(config.name) == config
    with pytest.raises(ValueError, match="persistent and 2\\^n columns wide"):
        GroupedConfig(64, 192, 64, 4, 2)
    with pytest.raises(ValueError, match="Triton fuses no loops with a branch"):
        GroupedConfig(128, 128, 128, 4, 3, halves=True, fused=True)


@pytest.mark.compile
def test_swiglu_on_its_own_is_built_for_hopper():
    pointers = {"both_ptr": "*bf16", "out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    name = "ch14.moe.kernels:swiglu_kernel"
    signature = pointers | {"N": "i32", "pitch": "i32"}
    (report,) = build.build([build.Job(name, signature, {"BLOCK_N": 1024}, "sm_90a", 4, 3)])
    assert report.status == "ok", report.reason


@pytest.mark.compile
@cases(
    "target, dtype, swiglu, unit",
    ("sm_90a", "fp8", True, "wgmma"),
    ("sm_90a", "fp8", False, "wgmma"),
    rarely("sm_90a", "bf16", False, "wgmma"),
    ("sm_100a", "bf16", True, "tcgen05_mma"),
    rarely("sm_100a", "fp8", False, "tcgen05_mma"),
    rarely("sm_103a", "fp8", False, "tcgen05_mma"),
    ("sm_120a", "fp8", False, "mma_sync"),
    rarely("sm_120a", "bf16", True, "mma_sync"),
    rarely("sm_121a", "bf16", False, "mma_sync"),
)
def test_every_target_has_a_kernel(target, dtype, swiglu, unit):
    able = [config for config in SETS[dtype, swiglu] if not rejection(config, target, dtype, swiglu)]
    (report,) = build.build([job(able[0], target, dtype, swiglu=swiglu)])
    assert report.status == "ok", report.reason
    assert report.counts[unit] and report.counts["tma_load"] and report.counts["tma_store"]
    assert target != "sm_90a" or not report.spills
