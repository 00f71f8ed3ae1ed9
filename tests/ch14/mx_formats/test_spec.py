"""Block-scaled formats: every code equal to ml_dtypes, rounding at every midpoint, the rules for scales and for what is
not finite, packing and the tiles of scales."""

import math

import ml_dtypes
import numpy
import pytest
import torch
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from ch14.mx_formats import number_formats, packing
from ch14.mx_formats.number_formats import E2M1, E4M3, E5M2, ELEMENTS, FORMATS

EVERY = pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))
E8M0 = [form for form in FORMATS.values() if form.scale == "e8m0"]
BOUNDED = settings(max_examples=30, deadline=None, derandomize=True)


def theirs(values, element):
    """Codes of ml_dtypes."""
    return torch.from_numpy(values.numpy().astype(getattr(ml_dtypes, element.dtype)).view(numpy.uint8))


def finite(element):
    return number_formats.decode(torch.arange(element.codes), element)


@EVERY
def test_every_code_is_worth_what_ml_dtypes_says(element):
    codes = numpy.arange(2**element.bits, dtype=numpy.uint8)
    wanted = codes.view(getattr(ml_dtypes, element.dtype)).astype(numpy.float32)
    found = number_formats.decode(torch.from_numpy(codes), element).numpy()
    assert numpy.array_equal(found, wanted, equal_nan=True)
    assert (numpy.signbit(found) == numpy.signbit(wanted)).all()
    assert element.max == float(ml_dtypes.finfo(getattr(ml_dtypes, element.dtype)).max)


def test_every_e8m0_code():
    codes = numpy.arange(256, dtype=numpy.uint8)
    wanted = codes.view(ml_dtypes.float8_e8m0fnu).astype(numpy.float32)
    assert numpy.array_equal(
        number_formats.decode_e8m0(torch.from_numpy(codes)).numpy(), wanted, equal_nan=True
    )
    assert float(number_formats.decode_e8m0(torch.tensor(0))) == 2.0**-127
    assert math.isnan(number_formats.decode_e8m0(torch.tensor(255)))


@EVERY
def test_rounding_is_that_of_ml_dtypes(element):
    numbers = finite(element)
    middle = (numbers[1:] + numbers[:-1]) / 2
    edge = element.max + float(numbers[-1] - numbers[-2]) / 2
    beside = [torch.from_numpy(numpy.nextafter(middle.numpy(), numpy.float32(way))) for way in (0, numpy.inf)]
    beyond = torch.tensor(
        [edge, numpy.nextafter(numpy.float32(edge), numpy.float32(numpy.inf)), 1e30, float("inf")]
    )
    random = torch.randn(20000) * element.max / 3
    small = torch.randn(20000) * 2.0 ** (element.emin - element.mantissa_bits)
    values = torch.cat([numbers, middle, *beside, beyond, random, small])
    values = torch.cat([values, -values])
    assert torch.equal(number_formats.encode(values, element, saturate=False), theirs(values, element))
    within = values.clamp(-element.max, element.max)
    assert torch.equal(number_formats.encode(values, element), theirs(within, element)), (
        "what is beyond saturates"
    )


@EVERY
def test_nan_is_kept_or_refused(element):
    nan = torch.tensor([float("nan"), 1.0])
    if element.specials:
        assert torch.equal(number_formats.encode(nan, element), theirs(nan, element))
    else:
        with pytest.raises(ValueError, match=f"{element.name} has no NaN, and a value is NaN"):
            number_formats.encode(nan, element)


@EVERY
def test_codes_come_back(element):
    codes = torch.arange(2**element.bits, dtype=torch.uint8)
    values = number_formats.decode(codes, element)
    kept = values.isfinite()
    assert torch.equal(number_formats.encode(values[kept], element), codes[kept]), "the sign of zero too"


@pytest.mark.parametrize("form", E8M0, ids=lambda form: form.name)
def test_the_scale_of_ocp_and_its_flaw(form):
    top = form.element.max
    power, special = 2.0**form.element.emax, (float("inf"), float("nan"), 2.0**-149, 3.4e38)
    amax = torch.tensor([power, top, top * 1.01, 2 * power, 0.0, *special])
    floor, ceil = (
        number_formats.e8m0_scale(amax, form.element, rule).tolist() for rule in number_formats.RULES
    )
    found = floor[:8]
    assert found == [127, 127, 127, 128, 0, 255, 255, 0], "above its largest number an element is still cut"
    assert ceil[:8] == [127, 127, 128, 128, 0, 255, 255, 0]
    assert (floor[8], ceil[8]) == (254 - form.element.emax, 255 - form.element.emax), "the largest float32"
    random = torch.rand(5000) * 10 + 1e-3
    for rule in number_formats.RULES:
        scaled = random / number_formats.decode_e8m0(number_formats.e8m0_scale(random, form.element, rule))
        assert bool((scaled >= 2.0**form.element.emax * (0.5 if rule == "ceil" else 1)).all())
        assert bool((scaled <= top).all()) == (rule == "ceil")
    # cuBLAS divides, then rounds up
    quotient = torch.exp2((random / torch.full_like(random, top)).log2().ceil())
    assert torch.equal(
        number_formats.decode_e8m0(number_formats.e8m0_scale(random, form.element, "ceil")), quotient
    )


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_blocks_of_zeros_and_of_what_is_not_finite(form):
    size = 2 * form.block[1]
    for strange in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(1, size)
        x[0, form.block[1] - 1] = strange
        of = number_formats.quantise(x, form)
        back = number_formats.dequantise(of)
        assert bool(back[0, : form.block[1]].isnan().all()) and not of.codes[0, : form.block[1]].any()
        assert torch.allclose(back[0, form.block[1] :], torch.ones(1), rtol=0.07), (
            "its neighbour is as it was"
        )
    zeros = number_formats.quantise(torch.tensor([[0.0, -0.0] * form.block[1]]), form)
    back = number_formats.dequantise(zeros)
    assert not back.any() and torch.equal(torch.signbit(back[0, :2]), torch.tensor([False, True]))
    tiny = torch.full((1, size), 2.0**-133).bfloat16()
    assert bool(number_formats.dequantise(number_formats.quantise(tiny, form)).isfinite().all())
    huge = torch.full((1, size), 3.3e38).bfloat16()
    back = number_formats.dequantise(number_formats.quantise(huge, form))
    assert bool((back > 1e38).all())


def test_nvfp4_has_two_levels():
    form = FORMATS["nvfp4"]
    x = torch.randn(32, 64)
    of = number_formats.quantise(x, form)
    assert float(of.tensor_scale) == float(x.abs().max() / torch.tensor(2688.0))
    assert int(of.scales.max()) == 0x7E, "the largest block has the largest scale, 448"
    cut = number_formats.quantise(x, form, scale=of.tensor_scale / 100)
    assert bool((number_formats.dequantise(cut).abs() <= 2689 * of.tensor_scale / 100).all()), (
        "a given one saturates"
    )
    small = x.clone()
    small[0, :16] = 1e-6 * small.abs().max()
    of = number_formats.quantise(small, form)
    found = int(of.scales[0, 0])
    assert found == 0, "a block that is too small beside the tensor's largest element becomes zero"
    assert not number_formats.dequantise(of)[0, :16].any()
    assert float(number_formats.tensor_scale(torch.zeros(2, 2))) == 1
    assert float(number_formats.tensor_scale(torch.tensor([[2688.0, float("inf"), float("nan")]]))) == 1


def test_deepseek_scales_by_128():
    x = torch.randn(130, 300)
    rows, blocks = (number_formats.quantise(x, name) for name in ("fp8_1x128", "fp8_128x128"))
    assert rows.scales.shape == (130, 3) and blocks.scales.shape == (2, 3)
    assert torch.equal(rows.scales[:, 2], x[:, 256:].abs().amax(1) / torch.tensor([448.0]))
    assert float(blocks.scales[1, 2]) == float(x[128:, 256:].abs().max() / torch.tensor(448.0))


@BOUNDED
@given(
    st.sampled_from(list(FORMATS)),
    st.integers(1, 5),
    st.integers(1, 140),
    st.integers(-100, 100),
    st.integers(0, 99),
)
def test_quantising_is_near_and_settles(name, rows, columns, power, seed):
    form = FORMATS[name]
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=random) * 2.0**power
    x[torch.rand(rows, columns, generator=random) < 0.1] = 0
    of = number_formats.quantise(x, form)
    back = number_formats.dequantise(of)
    amax = number_formats.join_blocks(
        number_formats.split_blocks(x, form.block)
        .abs()
        .amax(-1, keepdim=True)
        .expand(-1, -1, form.block[0] * form.block[1]),
        form.block,
        x.shape,
    )
    top = x.abs().max() if form.scale == "e4m3" else amax  # a small block beside a large one may vanish
    amax = amax.clamp(min=number_formats.DEEPGEMM_MIN_AMAX) if form.scale == "fp32" else amax
    # Half a step at the largest, or what is cut off between max and 2^(emax + 1).
    bound = max(
        2.0 ** -(form.element.mantissa_bits + 1), 1 - form.element.max / 2.0 ** (form.element.emax + 1)
    )
    assert bool(((back - x).abs() <= bound * 1.07 * amax + top * 2.0**-11).all())
    again = number_formats.quantise(back, form, scale=of.tensor_scale)
    if form.scale == "e8m0":
        assert torch.equal(number_formats.dequantise(again), back), "what is in the format already stays"


@BOUNDED
@given(st.sampled_from((4, 6, 8)), st.integers(1, 4), st.integers(1, 70), st.integers(0, 99))
def test_packing_has_an_inverse(bits, rows, columns, seed):
    codes = torch.randint(
        0, 2**bits, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    packed = packing.pack(codes, bits)
    assert packed.shape == (rows, -(-columns * bits // 8))
    assert torch.equal(packing.unpack(packed, bits, columns), codes)
    # a row is one little-endian number
    row = sum(int(code) << bits * index for index, code in enumerate(codes[0]))
    assert int.from_bytes(bytes(packed[0].tolist()), "little") == row


def test_the_first_element_is_in_the_low_nibble():
    assert packing.pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4).tolist() == [[0x21, 0x03]]
    assert packing.pack(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8), 6).tolist() == [[0x81, 0x30, 0x10]]


@BOUNDED
@given(st.integers(1, 300), st.integers(1, 11), st.integers(0, 99))
def test_tiles_of_scales_have_an_inverse(rows, columns, seed):
    scales = torch.randint(
        0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    tiled = packing.tile_scales(scales)
    assert tiled.numel() == packing.tiled_size(rows, columns) and tiled.numel() % 512 == 0
    assert torch.equal(packing.untile_scales(tiled, rows, columns), scales)
    row, column = (seed * 7) % rows, seed % columns
    tile = row // 128 * -(-columns // 4) + column // 4
    assert tiled[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] == scales[row, column]
    assert int(tiled.long().sum()) == int(scales.long().sum()), "padding is zero"


@cases(
    "call, words",
    (lambda: packing.pack(torch.tensor([[16]], dtype=torch.uint8), 4), "codes of 4 bits must be at"),
    (lambda: packing.pack(torch.zeros(3, dtype=torch.uint8), 4), "codes must be a uint8 matrix; it is"),
    (lambda: packing.pack(torch.zeros(1, 1, dtype=torch.uint8), 5), "bits must be 4, 6 or 8; it is 5"),
    (lambda: packing.unpack(torch.zeros(1, 3, dtype=torch.uint8), 4, 7), "must be a uint8 matrix of 4"),
    (lambda: packing.untile_scales(torch.zeros(500), 100, 3), "take 512 bytes in tiles; there are 500"),
    (lambda: number_formats.lookup("mxfp5"), "unknown format 'mxfp5'; choose one of"),
    (lambda: number_formats.quantise(torch.zeros(1, 1), "mxfp5"), "unknown format 'mxfp5'; choose one"),
    (lambda: number_formats.quantise(torch.ones(1, 1), FORMATS["mxfp4"], "up"), "unknown rule 'up'"),
    (lambda: number_formats.quantise(torch.ones(1, 1), FORMATS["nvfp4"], "ceil"), "scales of nvfp4 are e4m3"),
)
def test_bad_input_is_told_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_bits_an_element():
    found = [FORMATS[name].bits for name in ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4", "fp8_1x128")]
    assert found == [8.25, 6.25, 4.25, 4.5, 8.25]
    assert (E4M3.emax, E5M2.emax, E2M1.emax, E2M1.codes, E4M3.codes, E5M2.codes) == (8, 15, 2, 8, 127, 124)
