"""Kernels that the interpreter gets right since it is mended; compiled ones are right without."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import cases

import ch14  # noqa: F401, mends the interpreter where there is no GPU
from tilelab.runtime import device

WHERE = "cuda" if device.current().capability else "cpu"


@triton.jit
def convert_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def double(x):
    return tl.where(x > 0, 2 * x, tl.zeros_like(x))  # zeros_like is itself a function of Triton's language


@triton.jit
def double_twice_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, double(double(tl.load(x + at))))


def convert(x, dtype):
    out = torch.empty(x.shape, dtype=dtype, device=WHERE)
    convert_kernel[(x.numel() // 8192,)](x.to(WHERE), out, 8192)
    return out.cpu()


def test_bfloat16_has_the_bits_of_torch():
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(
        convert(every, torch.float32).view(torch.int32)[~every.isnan()],
        every.float().view(torch.int32)[~every.isnan()],
    )
    # Each bfloat16 with the lower halves that lie about a tie, and with others.
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xC000], dtype=torch.int32)
    x = (every.view(torch.int16).int()[:, None] << 16 | lower).view(torch.float32).flatten()
    found, wanted = convert(x, torch.bfloat16), x.bfloat16()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.view(torch.int16)[~x.isnan()], wanted.view(torch.int16)[~x.isnan()])


@pytest.mark.skipif(
    (device.current().capability or (9, 0)) < (8, 9), reason="this GPU cannot convert to float8"
)
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_float8_is_rounded_to_nearest_even_and_saturates(dtype):
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(midpoints, torch.tensor(end)) for end in (-1e30, 1e30)]
    x = torch.cat([numbers, midpoints, *beside, 1.5 * numbers[[0, -1]], 1e30 * numbers[[0, -1]]])
    x = torch.cat([x, torch.zeros(-len(x) % 8192)])
    largest = torch.finfo(dtype).max
    assert torch.equal(
        convert(x, dtype).view(torch.uint8), x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    )


@triton.jit
def dot_kernel(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_products_are_those_of_the_values(dtype):
    """Each value of the format, subnormal ones too, times 1; and products whose sums are exact in float32."""
    if dtype.itemsize == 1 and (device.current().capability or (9, 0)) < (8, 9):
        pytest.skip("this GPU has no products of float8")
    bits = (
        torch.arange(128, dtype=torch.uint8)
        if dtype.itemsize == 1
        else torch.arange(256, dtype=torch.int16) * 127
    )
    finite = bits.view(dtype).float()
    finite = finite[finite.isfinite()]
    values = torch.cat([finite, -finite]).repeat(5)[:1024].reshape(32, 32)
    numbers = torch.arange(1024).reshape(32, 32) % 15 - 7
    for pair in ((values, torch.eye(32)), (numbers, numbers.T)):
        a, b = (matrix.contiguous().to(WHERE, dtype) for matrix in pair)
        out = torch.empty(32, 32, device=WHERE)
        dot_kernel[(1,)](a, b, out, 32)
        assert torch.equal(out.double(), a.double() @ b.double())


def test_functions_call_functions_in_launch_after_launch():
    x = torch.arange(-8, 8, device=WHERE).float()
    out = torch.empty_like(x)
    for _ in range(2):
        double_twice_kernel[(1,)](x, out, 16)
        assert torch.equal(out, 4 * x.clamp(min=0))
        x += 1


INTERPRETED = pytest.mark.skipif(device.current().capability is not None, reason="for the interpreter")


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def bfloat16_kernel(x, y, out, sums, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a + b)
    tl.store(out + N + at, a * b - 1.5)
    tl.store(out + 2 * N + at, tl.where(a > -b, -a, tl.abs(b)))
    tl.store(out + 3 * N + at, tl.fma(a, b, a))
    tl.store(out + 4 * N + at, tl.sort(tl.maximum(a, b)))
    tl.store(out + 5 * N + at, tl.associative_scan(a, 0, larger))
    tl.store(out + 6 * N + at, tl.clamp(a, -1.0, 0.5))
    tl.store(out + 7 * N + at, tl.minimum(a * 2, b) / 3)
    tl.store(sums, tl.sum(a, 0))
    tl.store(sums + 1, tl.reduce(a, 0, larger))
    tl.store(sums + 2, tl.argmax(a, 0))
    tl.atomic_add(sums + 3, tl.load(x))


@INTERPRETED  # Triton 3.6 compiles no scan of bfloat16 by a function of one's own
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_numbers_are_rounded_after_each_operation(dtype):
    x, y = (
        torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(WHERE, dtype) for seed in (1, 2)
    )
    out, sums = torch.empty(8, 64, dtype=dtype, device=WHERE), torch.ones(4, dtype=dtype, device=WHERE)
    bfloat16_kernel[(1,)](x, y, out, sums, 64, enable_fp_fusion=False)
    wanted = [x + y, x * y - 1.5, torch.where(x > -y, -x, y.abs())]
    wanted += [(x.double() * y.double() + x.double()).to(dtype)]
    wanted += [torch.maximum(x, y).sort().values, x.cummax(0).values, x.clamp(-1, 0.5)]
    for found, each in zip(out, wanted):
        assert torch.equal(found, each)
    assert torch.allclose(out[7].float(), torch.minimum(2 * x, y).float() / 3, rtol=2**-7)
    assert sums[1] == x.max() and sums[2] == x.argmax() and sums[3] == 1 + x[0]
    assert abs(sums[0] - x.double().sum()) < 0.1


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn]
SPECIAL = [0.0, -0.0, 1.0625, 1.1875, 448.0, 464.0, 500.0, 57344.0, 61440.0, 65519.0, 65520.0, 1e30, -1e30]
SPECIAL += [0.013, 2.0**-9, 2.0**-10, 1.5 * 2**-10, 2.0**-16, 2.0**-17, 3 * 2.0**-18, 2.0**-24, 2.0**-25]
SPECIAL += [2.0**-133, 1e-45, 1 + 2**-8 + 2**-30, 1 + 2**-11 + 2**-40]
SPECIAL += [float("inf"), -float("inf"), float("nan")]


@INTERPRETED
@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_conversions_round_once_and_keep_special_numbers(source, target):
    x = torch.cat(
        [torch.tensor(SPECIAL, dtype=torch.float64).to(source), torch.zeros(32 - len(SPECIAL)).to(source)]
    )
    out = torch.empty(32, dtype=target)
    convert_kernel[(1,)](x, out, 32)
    exact, found = x.double(), out.double()
    assert torch.equal(exact.isnan(), found.isnan())
    largest = torch.finfo(target).max
    if target.itemsize == 1 and source != target:  # to float8 a GPU saturates
        exact = exact.clamp(-largest, largest)
    step = (
        2.0 ** exact.abs().clamp(torch.finfo(target).tiny, largest).log2().floor() * torch.finfo(target).eps
    )
    whole = (exact / step).round() * step  # ties to even
    whole = torch.where(whole.abs() > largest, whole.sign() * float("inf"), whole)
    whole = torch.where(exact.isinf() | (step == 0), exact, whole)
    assert torch.equal(found.nan_to_num(), whole.nan_to_num())
    assert torch.equal(found.signbit(), exact.signbit()) or found.isnan().any()


@triton.jit
def truncate_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty, fp_downcast_rounding="rtz"))


@cases(
    "dtype, wanted",
    (torch.bfloat16, [1.0, -1.0, 1.9921875, torch.finfo(torch.bfloat16).max, float("inf")]),
    (torch.float16, [1.0029296875, -1.0029296875, 1.9990234375, 65504.0, float("inf")]),
    (torch.float8_e5m2, [1.0, -1.0, 1.75, 57344.0, float("inf")]),
    ids=str,
)
def test_conversions_towards_zero(dtype, wanted):
    if dtype.itemsize == 1 and (device.current().capability or (9, 0)) < (8, 9):
        pytest.skip("this GPU cannot convert to float8")
    x = torch.tensor([1.0039, -1.0039, 1.9999, 3.4e38, float("inf"), 0, 0, 0], device=WHERE)
    out = torch.empty(8, dtype=dtype, device=WHERE)
    truncate_kernel[(1,)](x, out, 8)
    assert out[:5].double().tolist() == wanted


@INTERPRETED
@cases(
    "kind, wanted",
    (torch.int32, [2**31 - 1, -(2**31), 0, -2]),
    (torch.uint8, [255, 0, 0, 0]),
    (torch.int8, [-1, 0, 0, -2]),
    (torch.int64, [2**63 - 1, -(2**63), -(2**63), -2]),
    ids=str,
)
def test_integers_saturate_as_in_ptx(kind, wanted):
    out = torch.empty(4, dtype=kind)
    convert_kernel[(1,)](torch.tensor([1e30, -1e30, float("nan"), -2.7]), out, 4)
    assert out.tolist() == wanted


@triton.jit
def float8e4b15_kernel(x, codes, back, N: tl.constexpr):
    at = tl.arange(0, N)
    found = tl.load(x + at).to(tl.float8e4b15)
    tl.store(codes + at, found.to(tl.int8, bitcast=True))
    tl.store(back + at, found.to(tl.float32))


@INTERPRETED
def test_float8e4b15_is_what_triton_computes_with_integers():
    x = torch.tensor([1.0, -0.5, 1.75, 5.0, 2.0**-14, 2.0**-17, 0.0, 1.06])
    codes, back = torch.empty(8, dtype=torch.int8), torch.empty(8)
    float8e4b15_kernel[(1,)](x, codes, back, 8)
    assert back.tolist() == [1.0, -0.5, 1.75, 1.75, 2.0**-14, 2.0**-17, 0.0, 1.0]
    assert codes.view(torch.uint8).tolist() == [0x78, 0xF0, 0x7E, 0x7E, 0x08, 0x01, 0x00, 0x78]


@triton.jit
def scaled_kernel(
    a,
    b,
    a_scale,
    b_scale,
    out,
    A: tl.constexpr,
    B: tl.constexpr,
    KA: tl.constexpr,
    KB: tl.constexpr,
    GROUP: tl.constexpr,
):
    rows, scales = tl.arange(0, 32), tl.arange(0, 64 // GROUP)
    left = tl.load(a + rows[:, None] * KA + tl.arange(0, KA))
    right = tl.load(b + tl.arange(0, KB)[:, None] + rows * KB)
    left_scale = tl.load(a_scale + rows[:, None] * (64 // GROUP) + scales)
    right_scale = None if b_scale is None else tl.load(b_scale + rows[:, None] * (64 // GROUP) + scales)
    acc = tl.full((32, 32), 1.0, tl.float32)
    tl.store(out + rows[:, None] * 32 + rows, tl.dot_scaled(left, left_scale, A, right, right_scale, B, acc))


@INTERPRETED
@cases(
    "left, right, group, with_scale",
    ("e4m3", "e4m3", 32, True),
    ("e2m1", "e5m2", 32, True),
    ("e2m1", "bf16", 32, False),
    ("e2m1", "e2m1", 16, True),
)
def test_dot_scaled(left, right, group, with_scale):
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    operands, values = [], []
    for seed, kind in enumerate((left, right)):
        random = torch.Generator().manual_seed(seed)
        if kind == "e2m1":
            codes = torch.randint(0, 16, (32, 64), generator=random, dtype=torch.uint8)
            values.append(numbers[(codes & 7).long()] * torch.where(codes > 7, -1, 1))
            operands.append(codes[:, ::2] | codes[:, 1::2] << 4)
        else:
            dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}[kind]
            operands.append(torch.randn(32, 64, generator=random).to(dtype))
            values.append(operands[-1].float())
    scales = torch.randint(120, 134, (2, 32, 64 // group), dtype=torch.uint8)
    factors = torch.exp2(scales.float() - 127)
    if group == 16:
        scales = factors.to(torch.float8_e4m3fn)
        factors = scales.float()
    factors = factors.repeat_interleave(group, 2)
    out = torch.empty(32, 32)
    scaled_kernel[(1,)](
        *operands, scales[0], scales[1] if with_scale else None, out, left, right, operands[0].shape[1],
        operands[1].shape[1], group,
    )  # fmt: skip
    wanted = (
        1 + (values[0] * factors[0]).double() @ (values[1] * (factors[1] if with_scale else 1)).double().T
    )
    # float32 sums of products of both signs
    assert torch.allclose(out.double(), wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())


@triton.jit
def arguments_kernel(x, out, scale, count, flag, N: tl.constexpr):
    at = tl.arange(0, N)
    inside = (at >= 1) and (at < count)
    for step in range(2, 8, 3):
        tl.store(out + N + step, step.to(tl.float32) / 2)
    if flag and not (count < 0):
        tl.store(out + at, tl.load(x + at, mask=inside, other=0.0) * scale.to(tl.float32))


def test_numbers_conditions_and_loops_have_triton_types():
    x, out = torch.ones(16, device=WHERE, dtype=torch.bfloat16), torch.zeros(32, device=WHERE)
    arguments_kernel[(1,)](x, out, 0.1, 9, True, 16)
    wanted = torch.zeros(32)
    wanted[1:9], wanted[18], wanted[21] = 0.1, 1.0, 2.5
    assert torch.equal(out.cpu(), wanted)


@triton.jit
def integers_kernel(x, out, large, small, fraction):
    tl.store(out, (large + small).to(tl.float64) + fraction)
    tl.store(out + 1, (~tl.load(x)).to(tl.float64))


def test_integers_above_31_bits_and_inverted_ones_keep_their_values():
    x = torch.tensor([3], device=WHERE, dtype=torch.uint8)
    out = torch.empty(2, device=WHERE, dtype=torch.float64)
    integers_kernel[(1,)](x, out, 2**31, 5, 0.5)
    assert out.tolist() == [2**31 + 5.5, 252]


@triton.jit
def pointer_kernel(addresses, out):
    at = tl.arange(0, 256)
    values = tl.load(tl.load(addresses).to(tl.pointer_type(tl.float8e5)) + at)
    tl.store(out + at, values.to(tl.float32))


def test_an_address_becomes_a_pointer_to_float8():
    x = torch.arange(256, dtype=torch.uint8, device=WHERE).view(torch.float8_e5m2)
    out = torch.empty(256, device=WHERE)
    pointer_kernel[(1,)](torch.tensor([x.data_ptr()], device=WHERE), out)
    assert torch.equal(out.nan_to_num(7), x.float().nan_to_num(7))


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_float8_without_negative_zero(dtype):
    x = torch.arange(256, dtype=torch.uint8).view(dtype).repeat(32)
    assert torch.equal(convert(x, torch.float32).nan_to_num(7), x.float().nan_to_num(7))
    values = torch.randn(8192) * 30
    largest = torch.finfo(dtype).max
    assert torch.equal(convert(values, dtype).float(), values.clamp(-largest, largest).to(dtype).float())


def test_functions_of_libdevice_and_variables_around_a_kernel():
    from triton.language.extra import libdevice

    power = tl.constexpr(3)

    @triton.jit
    def kernel(x, out):
        at = tl.arange(0, 64)
        v = tl.load(x + at)
        tl.store(out + at, libdevice.tanh(v) + libdevice.pow(v, 2.0) * power + libdevice.rint(v))

    x = torch.randn(64, device=WHERE)
    out = torch.empty_like(x)
    kernel[(1,)](x, out)
    assert torch.allclose(out, x.tanh() + 3 * x * x + x.round(), atol=1e-5)


@INTERPRETED
def test_autotune_takes_the_first_configuration_whose_static_asserts_hold():
    configs = [triton.Config({"BLOCK": block}) for block in (8, 16, 32)]

    @triton.autotune(configs, key=["n"], reset_to_zero=["out"])
    @triton.jit
    def kernel(out, n, BLOCK: tl.constexpr):
        tl.atomic_add(out + tl.arange(0, BLOCK), 1.0)
        tl.static_assert(BLOCK > 8, "too small")

    out = torch.ones(32)
    kernel[(1,)](out, 16)
    assert kernel.best_config.kwargs == {"BLOCK": 16} and out.tolist() == [1.0] * 16 + [0.0] * 16
    kernel.configs = configs[:1]
    with pytest.raises(Exception, match="static_assert failed: too small"):
        kernel[(1,)](out, 16)


@INTERPRETED
def test_autotune_asks_the_performance_model():
    configs = [triton.Config({"BLOCK": block}) for block in (8, 16, 32)]
    model = {"perf_model": lambda **named: -named["BLOCK"], "top_k": 1}

    @triton.autotune(configs, key=["n"], prune_configs_by=model)
    @triton.jit
    def kernel(out, n, BLOCK: tl.constexpr):
        tl.store(out, BLOCK * 1.0)

    out = torch.empty(1)
    kernel[(1,)](out, 4)
    assert out.item() == 32


@INTERPRETED
def test_a_launch_that_no_gpu_takes_is_refused():
    with pytest.raises(KeyError, match="double_twice_kernel has no parameter BLOCKS"):
        double_twice_kernel[(1,)](torch.zeros(8), torch.zeros(8), 8, BLOCKS=8)
    says = "takes no int64 of numpy: pass value.item()"
    with pytest.raises(triton.runtime.errors.InterpreterError, match=says):
        integers_kernel[(1,)](torch.zeros(1), torch.zeros(2), 1, np.int64(1), 0.5)
    with pytest.raises(TypeError, match=r"a grid is a tuple, such as \(4,\), not 2"):
        double_twice_kernel[2](torch.zeros(8), torch.zeros(8), 8)


@triton.jit
def continue_kernel(x):
    for step in range(4):
        if step == 1:
            continue
        tl.store(x + step, 1.0)


@triton.jit
def library_kernel(x):
    tl.store(x, tl.extra.cuda.libdevice.tanh(tl.load(x)))


@triton.jit
def assembly_kernel(x):
    tl.store(
        x, tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [tl.load(x)], tl.float32, True, 1)
    )


@triton.jit
def float8_kernel(x):
    tl.store(x, tl.load(x) + tl.load(x))


@triton.jit
def chain_kernel(x):
    tl.store(x + tl.arange(0, 8), 1.0, 2 < tl.arange(0, 8) < 5)


@triton.jit
def condition_kernel(x):
    if tl.arange(0, 8) > 3:
        tl.store(x, 1.0)


@triton.jit
def many_kernel(x, *others):
    tl.store(x, 1.0)


@INTERPRETED
@cases(
    "kernel, dtype, reason",
    (many_kernel, torch.float32, r"many_kernel takes \*others, which Triton does not compile: pass a tuple"),
    (assembly_kernel, torch.float32, r"line \d+: Triton's interpreter cannot run inline_asm_elem"),
    (float8_kernel, torch.float8_e5m2, "a GPU has no arithmetic for fp8e5: convert the values to float16"),
    (chain_kernel, torch.float32, r"does not compile a chain of comparisons: write \(a <= x\) & \(x < b\)"),
    (condition_kernel, torch.float32, "a condition has one element, not a block"),
    (continue_kernel, torch.float32, "Triton does not compile continue: write the kernel without it"),
    (library_kernel, torch.bfloat16, "libdevice has no tanh of bf16: convert the values to float32"),
)
def test_what_is_not_supported_is_named_in_one_sentence(kernel, dtype, reason):
    with pytest.raises(triton.runtime.errors.InterpreterError, match=reason) as caught:
        kernel[(1,)](torch.zeros(8).to(dtype))
    assert "\n" not in str(caught.value)
