"""MXFP4 weights for a few tokens: against float64, bit by bit, what it refuses, and what every target gets."""

import itertools
import re
from collections import Counter

import pytest
import sentences
import torch
from cases import cases

from ch14 import fp4_decode
from ch14.fp4_decode import DecodeConfig, decode, spec
from ch14.fp4_decode.kernels import DECODE, DECODE_WIDE, mark_wide_scales
from tilelab.measure import check
from tilelab.runtime import build, device

HERE = device.current()
WHERE = "cuda" if HERE.capability else "cpu"
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
# the choice up to 8 tokens, and up to 16
FEW, MORE = ("128×2048 · 8 warps · 4 stages · registers", "256×1024 · 8 warps · 2 stages · registers")
SMALL = DecodeConfig("plain", 16, 128, 4, 1)
EVERY = [
    *fp4_decode.configs(16).values(),
    DecodeConfig("registers", 16, 128, 1, 1),
    DecodeConfig("registers", 64, 256, 2, 2),
    DecodeConfig("registers", 128, 512, 8, 2),
]


def case(m, n, k, scales=(118, 128)):
    x = torch.randn(m, k, device=WHERE).bfloat16()
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=WHERE)
    return x, weight, torch.randint(scales[0], scales[1] + 1, (n, k // 32), device=WHERE).to(torch.uint8)


def every_code(scale_of_row, tokens):
    """One-hot tokens (M, K) and weights of all codes: an output is one weight, of a row whose scale is its number."""
    n, k = len(scale_of_row), tokens.shape[1]
    codes = (torch.arange(n)[:, None] + torch.arange(k)) % 16
    weight = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scales = scale_of_row.to(torch.uint8)[:, None].repeat(1, k // 32)
    return tokens.bfloat16().to(WHERE), weight.to(WHERE), scales.contiguous().to(WHERE)


def same(result, wanted):
    return torch.equal(
        torch.nan_to_num(result.float(), nan=7e-30), torch.nan_to_num(wanted.float(), nan=7e-30)
    )


def test_spec_by_hand():
    x, weight, scales = (each.cpu() for each in case(3, 4, 64, (100, 140)))
    for m in range(3):
        for n in range(4):
            total = 0.0
            for k in range(64):
                code = int(weight[n, k // 2]) >> 4 * (k % 2) & 15
                value = (-1) ** (code >> 3) * MAGNITUDES[code & 7] * 2.0 ** (int(scales[n, k // 32]) - 127)
                total += float(x[m, k]) * value
            assert abs(total - float(spec(x, weight, scales)[m, n])) <= 1e-9 * abs(total) + 1e-12


def matches(config, shapes):
    for m, n, k in shapes:
        x, weight, scales = case(m, n, k)
        kept = [each.clone() for each in (x, weight, scales)]
        out, touched = check.make_poisoned((m, n), torch.bfloat16, WHERE)
        launch = fp4_decode.prepare(x, weight, scales, out=out, config=config)
        first = launch().clone()
        assert check.relative_error(first, spec(x, weight, scales)) < 2**-8, (config, m, n, k)
        assert not touched(), (config, m, n, k)
        # the counters are back at zero
        assert first.data_ptr() != out.data_ptr() and torch.equal(launch(), first)
        assert all(torch.equal(now, before) for now, before in zip((x, weight, scales), kept))


def test_plain_on_ragged_shapes():
    matches(SMALL, [(1, 1, 32), (2, 17, 64), (17, 16, 416), (64, 5, 288)])
    matches("best", [(3, 70, 96)])


def special(config, k=288):
    x, weight, scales = case(5, 40, k)
    scales[3, 2] = 255
    scales[4, 8] = 255
    scales[6:9] = 0
    scales[9, 3] = 230
    weight[11] = 0
    out = decode(x, weight, scales, config=config)
    wanted = spec(x, weight, scales)
    assert out[:, 3:5].isnan().all() and wanted[:, 3:5].isnan().all()
    assert not out[:, 5:].isnan().any() and (out[:, 11] == 0).all()
    for row in (0, 9, 10):
        assert check.relative_error(out[:, row], wanted[:, row]) < 2**-8
    x[1, 7] = float("nan")
    x[2, 8] = float("inf")
    out, wanted = decode(x, weight, scales, config=config), spec(x, weight, scales)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.isinf(), wanted.isinf() | (wanted.abs() > 3.4e38))


def bits(config, k=64):
    rows = torch.arange(256)
    for tokens in torch.eye(k).split(64):
        given = every_code(rows, 2.0**10 * tokens)  # so that no product is a subnormal, though weights are
        assert same(decode(*given, config=config), spec(*given).bfloat16())
        given = every_code(rows[2:253], tokens)
        assert same(decode(*given, config=config), spec(*given).bfloat16())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the infinities that are meant
def test_special_scales_and_tokens():
    special(SMALL)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("k", [64, 128])
def test_every_code_at_every_scale(k):
    bits(SMALL, k)


@pytest.mark.gpu
@pytest.mark.parametrize("config", EVERY, ids=str)
def test_every_configuration_on_the_gpu(config):
    if config.kernel == "wgmma":
        matches(config, [(1, 1, 128), (5, 70, 896), (16, 300, 2176), (9, 129, 4224)])
    else:
        matches(config, [(1, 1, 32), (5, 70, 800), (16, 300, 2080), (9, 129, 4128)])
        special(config)
    special(config, 384)  # a multiple of 128: the scan loads four scales at once
    if fp4_decode.padded_tokens(64) * config.share <= 32768 or config.kernel == "plain":
        if config.kernel != "wgmma":
            bits(config)
        bits(config, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [127, 128, 129, 140, 200, 254, 255])
def test_one_large_scale_anywhere_on_the_gpu(scale):
    config = DecodeConfig("registers", 64, 512, 4, 2)
    for k, (large, block) in itertools.product(
        (1280, 1248), ((0, 0), (63, 15), (64, 16), (129, 38), (77, 31))
    ):
        x, weight, scales = case(9, 130, k)
        scales[large, block] = scale
        wanted, out = spec(x, weight, scales), decode(x, weight, scales, config=config)
        number = ~wanted.isnan()
        assert torch.equal(out.isnan(), ~number)
        for row in {*range(0, 130, 7), large}:
            keep = number[:, row]
            assert not keep.any() or check.relative_error(out[keep, row], wanted[keep, row]) < 2**-8, (
                scale,
                row,
            )


@pytest.mark.gpu
def test_up_to_64_tokens_on_the_gpu():
    for m in (17, 33, 64):
        for config in list(fp4_decode.configs(m).values())[:3]:
            matches(config, [(m, 200, 1152)])


def run_ptx(asm, word, *operands):
    """The decoding in Python: 32-bit words as int64, bf16 pairs through float32, whose products are exact here."""

    def product(a, b):
        made = torch.zeros_like(a)
        for half in (0, 16):
            left, right = (
                (each >> half & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16).float()
                for each in (a, b)
            )
            made |= ((left * right).bfloat16().view(torch.int16).long() & 0xFFFF) << half
        return made

    registers = {"$8": word, "$9": operands[0], "$10": operands[-1]}
    steps = {
        "and.b32": lambda a, b: a & b,
        "shr.u32": lambda a, b: a >> b,
        "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
        "mul.rn.bf16x2": product,
    }
    made = []
    for opcode, to, left, right in re.findall(r"([a-z]\S+) (\S+), (\S+), (\S+);", asm):
        if opcode == "mov.b32":  # {low, high}, pair
            made.append(registers[right])
            continue
        left, right = (
            registers[name] if name in registers else torch.full_like(word, int(name, 0))
            for name in (left, right)
        )
        registers[to] = steps[opcode](left, right)
    assert len(made) == 4 and "{$6, $7}" in asm
    return made


@pytest.mark.parametrize("wide", [False, True])
def test_the_ptx_decodes_every_code_in_every_place(wide):
    low, scale = torch.meshgrid(
        torch.arange(0, 65536, 331 if wide else 31),  # every code in each of four places
        torch.arange(256) if wide else torch.arange(0, 129, 8),
        indexing="ij",
    )
    word = low.flatten() | (low.flatten() * 7919 + 11) % 65536 << 16
    scale = scale.flatten()
    if wide:
        pair = scale * 0x00800080 + torch.where((scale == 0) | (scale == 255), 0x00400040, 0)
        made = run_ptx(DECODE_WIDE.value, word, pair, torch.full_like(word, 0x7E807E80))
    else:
        made = run_ptx(DECODE.value, word, scale * 0x00800080 + 0x3F003F00)
    factor = torch.where(scale == 255, float("nan"), torch.exp2(scale.double() - 127)).float()
    table = torch.tensor(MAGNITUDES + tuple(-each for each in MAGNITUDES))
    table[8] = -0.0
    for place, pairs in enumerate(made):
        for half in (0, 16):
            wanted = (table[word >> half + 4 * place & 15] * factor).bfloat16()
            found = (pairs >> half & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)
            number = ~wanted.isnan()
            assert torch.equal(found.isnan(), ~number)
            assert torch.equal(found[number].view(torch.int16), wanted[number].view(torch.int16))


def test_the_scan_marks_scales_over_128():
    scales = torch.arange(256, dtype=torch.uint8)
    for place in range(4):
        for rest in (0, 127, 128, 1):
            words = torch.full((256, 4), rest, dtype=torch.uint8)
            words[:, place] = scales
            marked = mark_wide_scales.fn(words.view(torch.int32)).view(torch.uint8)
            assert (marked[:, place].bool() == (scales > 128)).all() and marked.bool().sum() == 127


@pytest.mark.compile
def test_a_scan_decides_before_the_first_product():
    for config, m in ((fp4_decode.configs(8)[FEW], 8), (fp4_decode.configs(16)[MORE], 16)):
        report = build.build_one(fp4_decode.job(config, "sm_90a", m))
        # two programs of 256 threads per SM
        assert report.launchable and not report.spills and report.registers <= 128
        assert "BRA.DIV" not in report.sass  # the compiler knows that all threads take the same loop
        assert asked_before_decoded(report)
        weights = [place.start() for place in re.finditer(r"LDG\.E\.128", report.sass)]
        assert min(weights) < report.sass.index("ACQBULK") < report.sass.index("HMMA")
        loop = main_loop(report)
        assert not loop["STS"] and not loop["BAR"] and not loop["SHFL"] and not loop["LDL"]


@pytest.mark.compile
@pytest.mark.parametrize("m, each", [(8, 2), (16, 8)])
def test_the_last_program_asks_for_four_shares_at_once(m, each):
    config = next(iter(fp4_decode.configs(m).values()))
    sass = build.build_one(fp4_decode.job(config, "sm_90a", m)).sass
    tail = re.findall(r"(LDG\.E\.64\.STRONG|FADD|BRA)", sass[sass.index("ATOMG") :])
    assert tail[: 4 * each] == ["LDG.E.64.STRONG"] * 4 * each and tail.count("LDG.E.64.STRONG") == 4 * each
    assert sass.count("STG.E.64 ") == each  # a thread stores two sums of neighbouring tokens at once


def refused(message, *changes, error=ValueError, **options):
    x, weight, scales = case(4, 20, 64)
    with sentences.refused(message, error):
        decode(**({"x": x, "weight": weight, "scales": scales} | dict(changes)), **options)


def test_bad_input_gets_one_sentence():
    x, weight, scales = case(4, 20, 64)
    refused("x must be a torch.Tensor; it is a list", ("x", [1.0]))
    refused("x must be bfloat16; it is float32", ("x", x.float()))
    refused("weight must be uint8; it is int8", ("weight", weight.to(torch.int8)))
    refused("weight must be contiguous", ("weight", torch.cat([weight, weight], 1)[:, ::2]))
    refused("all tensors must be on one device; scales is on meta", ("scales", scales.to("meta")))
    with pytest.raises(RuntimeError, match="tiles::decode has no backward pass: dequantise"):
        decode(x.clone().requires_grad_(), weight, scales).sum().backward()
    refused(
        "x must start .* it starts 2 bytes past one", ("x", torch.cat([x, x]).flatten()[1:257].view(4, 64))
    )
    refused("x has 65 tokens; decode takes 1 to 64", ("x", case(65, 1, 64)[0]))
    refused("K is 48 and N is 20; K must be a multiple of 32", ("x", x[:, :48].contiguous()))
    refused("scales must be 20 x 2; it is 19 x 2", ("scales", scales[:19]))
    refused("out must be 4 x 20; it is 4 x 19", out=torch.empty(4, 19, dtype=torch.bfloat16, device=WHERE))
    refused("out lies in the memory of x", ("x", x), out=x.flatten()[:80].view(4, 20))
    refused(
        "out lies in the memory of weight",
        ("weight", weight),
        out=weight.flatten()[:160].view(torch.bfloat16).view(4, 20),
    )


def test_no_tokens_are_no_error():
    x, weight, scales = case(4, 20, 64)
    for launch in (fp4_decode.prepare(x[:0], weight, scales), lambda: decode(x[:0], weight, scales)):
        assert launch().shape == (0, 20)
    out = torch.empty(0, 20, dtype=torch.bfloat16, device=WHERE)
    assert fp4_decode.prepare(x[:0], weight, scales, out=out)() is out
    with pytest.raises(ValueError, match="weight must be 20 x 16; it is 20 x 32"):
        fp4_decode.prepare(x[:0, :32], weight, scales)


def test_a_grid_holds_the_shares():
    x, weight, scales = (
        torch.empty(1, columns, dtype=kind, device=WHERE)
        for columns, kind in ((2**24, torch.bfloat16), (2**23, torch.uint8), (2**19, torch.uint8))
    )
    with pytest.raises(ValueError, match="at most 65,535 shares of K; a share of 128 makes 131,072"):
        fp4_decode.prepare(x, weight, scales, config=DecodeConfig("plain", 64, 128, 4, 2))


@pytest.mark.skipif(HERE.capability is not None, reason="without a GPU")
def test_the_interpreter_has_no_gluon():
    refused("Triton, not Gluon or CUDA", config=next(iter(fp4_decode.configs(4))), error=device.Unsupported)


@cases(
    "given, message",
    (("fast", 64, 512, 4, 2), "choose wgmma, registers or plain"),
    (("plain", 96, 512, 4, 2), "power of two from 16 to 512"),
    (("registers", 64, 512, 8, 2), "8 warps need 128 rows"),
    (("registers", 64, 128, 4, 2), "more than a share"),
    (("plain", 64, 64, 4, 2), "share is 64; it must be a power of two"),
    (("plain", 64, 512, 4, 0), "num_stages"),
    (("wgmma", 96, 512, 4, 4), "block_n is 96; for wgmma it must be one of 64, 128"),
    (("wgmma", 64, 500, 4, 4), "share is 500; for wgmma"),
    (("wgmma", 64, 512, 8, 4), "num_warps is 8; for wgmma it must be 4"),
    (("wgmma", 64, 512, 4, 2), "num_stages is 2; for wgmma"),
    (("plain", 64.0, 512, 4, 2), "block_n is 64.0; it must be a power of two"),
    (("plain", 64, "512", 4, 2), "share is '512'; it must be a power of two"),
)
def test_bad_configurations_get_one_sentence(given, message):
    with pytest.raises(ValueError, match=message):
        DecodeConfig(*given)


def test_the_choice_fills_the_gpu_and_fits():
    h200 = device.Device("H200", (9, 0), "sm_90a", 132)
    assert str(fp4_decode.best_config(16, 8192, 8192, h200)) == MORE
    assert {str(fp4_decode.best_config(m, n, 8192, h200)) for m, n in ((1, 8192), (8, 28672))} == {FEW}
    for m, (n, k) in itertools.product(
        (17, 40, 64), ((1024, 4096), (4096, 4096), (8192, 8192), (28672, 4096))
    ):
        config, why = fp4_decode.find_best(m, n, k, h200)
        assert config.kernel == "wgmma" or n * k < 2**23, "small weights"
        assert "by the model" in why
    assert fp4_decode.best_config(64, 2880, 2880, h200).kernel == "registers"  # K is no multiple of 128
    assert fp4_decode.find_best(64, 8192, 8192, h200, aligned=False)[0].kernel == "registers"
    found = fp4_decode.find_best(64, 8192, 8192, device.Device("B200", (10, 0), "sm_100a", 148))[1]
    assert found == "by the extents"
    for m, n, k in ((8, 12288, 1536), (16, 4096, 4096)):  # large tiles, one per SM, beat small ones
        assert fp4_decode.best_config(m, n, k, h200).block_n == 128
    assert fp4_decode.best_config(1, 64, 64, device.Device("A100", (8, 0), "sm_80", 108)).kernel == "plain"
    for m in (1, 8, 9, 33, 64):
        tokens = fp4_decode.padded_tokens(m)
        assert tokens >= min(m, 32) and all(
            tokens * config.share <= 32768
            for config in fp4_decode.configs(m).values()
            if config.kernel == "registers"
        )


@pytest.mark.compile
def test_every_family_of_targets_builds_both_kernels():
    plain = {"sm_90a": "wgmma", "sm_100a": "tcgen05_mma", "sm_120a": "mma_sync"}
    jobs = [fp4_decode.job([*fp4_decode.configs().values()][-2], target) for target in plain]
    jobs += [fp4_decode.job(EVERY[0], target) for target in ("sm_90a", "sm_120a")]
    for report in build.build(jobs):
        assert report.launchable, report.reason
        registers = "registers" in report.job.kernel
        assert report.counts["mma_sync" if registers else plain[report.job.target]] > 0
        assert (report.ptx.count("mul.rn.bf16x2") > 0) == registers


def asked_before_decoded(report):
    """Whether each loop that multiplies asks for weights before its first product: ptxas likes to do it at the end."""
    at = {
        int(place, 16): opcode
        for place, opcode in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", report.sass)
    }
    loops = [
        [at[place] for place in sorted(at) if int(to, 16) <= place <= int(end, 16)]
        for end, to in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?BRA[^;]* 0x([0-9a-f]+)", report.sass)
    ]
    loops = [
        [opcode for opcode in body if opcode == "LDG.E.128" or opcode.startswith("HMMA")] for body in loops
    ]
    loops = [body for body in loops if len(set(body)) > 1]
    return len(loops) == 2 and all(body[0] == "LDG.E.128" for body in loops)


def test_small_weights_go_by_bf16():
    h200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132)
    fast = [shape for shape in itertools.product((16, 32, 64), (2304, 4096, 8192), (2048, 4096, 8192))]
    fast = [shape for shape in fast if fp4_decode.is_bf16_faster(*shape, h200)]
    assert {m for m, _, _ in fast} == {32, 64} and (64, 4096, 4096) in fast
    assert max(n * k for _, n, k in fast) <= 35e6
    x, weight, scales = case(40, 64, 128)
    first = fp4_decode.prepare(x, weight, scales, config="bf16")
    second = fp4_decode.prepare(x[:17], weight, scales, config="bf16")
    assert first.config == "bf16"
    assert first.run.args[1].data_ptr() == second.run.args[1].data_ptr(), "one copy"
    for launch, tokens in (first, x), (second, x[:17]):
        assert torch.allclose(launch().double(), spec(tokens, weight, scales), rtol=2**-6, atol=2**-6)
    writes = (
        weight.bitwise_not_,
        lambda: setattr(weight, "data", weight.flip(0)),
        lambda: weight.data.bitwise_not_(),
    )
    for write in (*writes, lambda: scales.data.add_(1), lambda: setattr(weight, "data", weight[:32].clone())):
        write()
        scales.data = scales[: len(weight)].clone()
        again = fp4_decode.prepare(x, weight, scales, config="bf16")
        assert torch.allclose(again().double(), spec(x, weight, scales), rtol=2**-6, atol=2**-6)
    assert fp4_decode.prepare(x[:0], weight, scales, config="bf16")().shape == (0, len(weight))


@pytest.mark.gpu
def test_a_launch_waits_for_the_tokens_of_the_one_before():
    x, weight, scales = case(8, 4096, 4096, (115, 118))
    steps = [x] + [torch.empty_like(x) for _ in range(4)]
    chain = [fp4_decode.prepare(given, weight, scales, out=out) for given, out in zip(steps, steps[1:])]
    for launch in chain:
        launch()
        torch.cuda.synchronize()
    wanted = [each.clone() for each in steps[1:]]
    for _ in range(20):
        for each in steps[1:]:
            each.fill_(float("nan"))
        for launch in chain:
            launch()
        assert all(torch.equal(found, each) for found, each in zip(steps[1:], wanted))
        assert wanted[-1].isfinite().all()


def main_loop(report):
    """Count the opcodes, without suffixes, in the shortest loop of the SASS that multiplies on the tensor core."""
    line = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)([^;]*);", re.MULTILINE)
    found = [(int(address, 16), opcode, rest) for address, opcode, rest in line.findall(report.sass)]
    loops = []
    for address, opcode, rest in found:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if opcode == "BRA" and target and int(target[1], 16) < address:
            body = Counter(name for place, name, _ in found if int(target[1], 16) <= place <= address)
            if body["HMMA"] + body["HGMMA"]:
                loops.append(body)
    return min(loops, key=Counter.total, default=Counter())


@pytest.mark.compile
def test_weights_stay_in_registers_and_cost_few_instructions():
    few, more = ([*fp4_decode.configs(m).values()] for m in (1, 16))
    for m, config in ((1, few[0]), (1, few[2]), (16, more[0])):
        report = build.build_one(fp4_decode.job(config, "sm_90a", m))
        loop = main_loop(report)
        assert "LDG.E.128" in report.sass and "HMUL2.BF16" in report.sass
        # weights do not wait; all else does
        assert report.sass.index("LDG.E.128") < report.sass.index("ACQBULK")
        assert asked_before_decoded(report)
        assert not loop["STS"] and not loop["BAR"] and not loop["SHFL"] and not loop["LDL"]
        weights_per_lane = config.block_n * 128 * config.num_stages / (32 * config.num_warps)
        assert loop.total() / weights_per_lane < 3.1
