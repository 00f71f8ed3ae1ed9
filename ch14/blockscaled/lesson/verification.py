"""Check every path of `ch14.blockscaled` against float64, in poisoned memory and on ragged shapes.

Without a GPU, the paths that Triton's interpreter runs are checked.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from ch14 import mx_formats
from ch14.blockscaled import decode, emulated, fp8
from ch14.blockscaled.fp8 import Fp8Config
from ch14.mx_formats import Packed, number_formats, packing
from tilelab.measure import check
from tilelab.runtime import build, device

FORMS = ("mxfp8_e4m3", "mxfp4", "nvfp4")
TOKENS = (1, 2, 4, 8, 16, 32, 64)
RAGGED = ((1, 64, 128), (300, 328, 640), (1000, 640, 1664))
BF16 = torch.bfloat16
EPILOGUES = (
    dict(bias=True),
    dict(bias=True, activation="silu"),
    dict(bias=True, activation="silu", packed=True),
    dict(activation="gelu", packed=True),
)
SPLIT_CONFIG = fp8.best_config(64, 128, 128 * 96, 3, mx=True)  # three CTAs share the K steps of a tile
EPILOGUE_CONFIG = Fp8Config(stages=4, epilogue_warps=2)


def fp8_operands(m: int, n: int, k: int, where="cuda") -> list[torch.Tensor]:
    """Return random a (M, K) and b (K, N) in fp8, their scales, and room for C, as `fp8.prepare` and torch take them.

    The scales of A lie column by column, each column at a multiple of 16 bytes.
    """
    a, weight = (
        number_formats.quantise(torch.randn(rows, k, device=where), number_formats.lookup(form))
        for rows, form in ((m, "fp8_1x128"), (n, "fp8_128x128"))
    )
    scale_a = torch.empty(k // 128, math.ceil(m / 4) * 4, device=where)[:, :m].copy_(a.scales.T).T
    a_codes, b_codes = a.codes.view(torch.float8_e4m3fn), weight.codes.view(torch.float8_e4m3fn).T
    return [a_codes, b_codes, scale_a, weight.scales.T, torch.empty(m, n, dtype=BF16, device=where)]


def make_packed(form: str, rows: int, columns: int, where="cuda", tiled: bool = False) -> Packed:
    """Return a random matrix in a block format. Its blocks differ in size, so that a scale out of place is seen."""
    sizes = torch.exp2(torch.randint(-3, 4, (rows, math.ceil(columns / 16)), device=where).float())
    x = torch.randn(rows, columns, device=where) * sizes.repeat_interleave(16, 1)[:, :columns]
    made = number_formats.quantise(x, number_formats.lookup(form))
    pair = None if made.tensor_scale is None else torch.cat([made.tensor_scale, 1 / made.tensor_scale])
    return Packed(
        made.format,
        (rows, columns),
        packing.pack(made.codes, made.format.element.bits).contiguous(),
        packing.tile_scales(made.scales) if tiled else made.scales,
        pair,
        tiled,
    )


def judge(out, reference, touched, tolerance: float = check.TOLERANCE[BF16], also: str = "") -> dict:
    """Return {status, reason, error, tolerance} of a result in poisoned memory. `also` is a fault found otherwise."""
    error = check.relative_error(out, reference.to(out.device))
    reason = (
        touched() or also or ("" if error <= tolerance else f"the error {error:.1e} is above {tolerance:.1e}")
    )
    return {"status": "wrong" if reason else "ok", "reason": reason, "tolerance": tolerance} | (
        {"error": error} if math.isfinite(error) else {}
    )


def verify_fp8(
    shape,
    config="best",
    bias: bool = False,
    activation: str | None = None,
    packed: bool = False,
    reference_on: str = "cuda",
) -> dict:
    """Check three launches of the fp8 kernel against float64 and each other. A `packed` output must be bit for bit what
    `mx_formats.quantise` makes of the bf16 result."""
    tensors = fp8_operands(*shape, where=reference_on)[:4]
    vector = torch.randn(shape[1], device=reference_on).to(BF16) if bias else None
    reference = fp8.spec(*tensors, vector, activation)
    tensors = [each.cuda() for each in tensors]  # keeps strides
    options = dict(bias=None if vector is None else vector.cuda(), activation=activation, config=config)
    out, touched = check.make_poisoned(shape[:2], BF16, "cuda")
    launch = fp8.prepare(*tensors, out=out, **options)
    first = launch().clone()
    for _ in range(2):
        launch()
    also = "" if torch.equal(first, out) else "another launch gives other bits"
    if packed:
        room = mx_formats.empty(shape[:2], "mxfp8_e4m3", "cuda")
        room.values.fill_(0x7F), room.scales.fill_(0x7F)
        fp8.fp8(*tensors, out=room, **options)
        expected = mx_formats.quantise(out, "mxfp8_e4m3")
        if not (torch.equal(room.values, expected.values) and torch.equal(room.scales, expected.scales)):
            also = also or "the epilogue quantises to other bits than mx_formats.quantise"
    return judge(out, reference, touched, also=also)


def _places(reference_on: str) -> tuple[str, str]:
    """Return where kernels run and where references are computed: without a GPU both on the CPU."""
    return ("cuda", reference_on) if device.current().has_tma else ("cpu", "cpu")


def verify_emulated(forms: tuple[str, str], shape, reference_on: str = "cuda") -> dict:
    """Check the emulated path against float64."""
    (m, n, k), (where, reference_on) = shape, _places(reference_on)
    made = [make_packed(form, rows, k, reference_on) for rows, form in zip((m, n), forms)]
    a, weight = (
        dataclasses.replace(matrix, **{name: tensor.to(where) for name, tensor in matrix.tensors().items()})
        for matrix in made
    )
    out, touched = check.make_poisoned((m, n), BF16, where)
    emulated.prepare(a, weight.T, out=out)()
    return judge(out, emulated.spec(made[0], made[1].T), touched)


def verify_decode(m: int, n: int, k: int, config="best", reference_on: str = "cuda") -> dict:
    """Check the decode path against float64."""
    where, reference_on = _places(reference_on)
    weight = make_packed("mxfp4", n, k, reference_on)
    tensors = torch.randn(m, k, device=reference_on).to(BF16), weight.values, weight.scales
    out, touched = check.make_poisoned((m, n), BF16, where)
    decode.decode(*(each.to(where) for each in tensors), out=out, config=config)
    return judge(out, decode.spec(*tensors), touched)


def fp8_jobs(configs, options: dict | None = None) -> list[build.Job]:
    """Return the compilations that `verify_fp8` needs for each configuration, with an epilogue of EPILOGUES or none."""
    options = options or {}
    return [
        fp8.job(config, "sm_90a", options.get("bias", False), options.get("activation"), mx)
        for config in configs
        for mx in sorted({False, options.get("packed", False)})
    ]


def _epilogue_words(options: dict) -> str:
    return " + ".join(key if value is True else str(value) for key, value in options.items())


def check_correctness() -> list[dict]:
    """Return a row {path, name, shape, status, ...} for every check of every path on ragged shapes."""
    cases, here, ragged = (
        [],
        device.current(),
        (333, 384, 640),
    )  # (path, name, shape, check and its arguments)
    if here.has_wgmma:

        def choose(packed: bool) -> dict:
            return {"best": fp8.best_config(*ragged, here.sms, packed), "split": SPLIT_CONFIG}

        named = fp8.configs() | choose(False) | {"epilogue warps": EPILOGUE_CONFIG}
        finished = [(options, choose(options.get("packed", False))) for options in EPILOGUES]
        jobs = fp8_jobs(named.values()) + [
            job for options, chosen in finished for job in fp8_jobs(chosen.values(), options)
        ]
        build.compile_ahead(
            jobs + [decode.job(decode.best_config(m, 300, 4128, here), here.target, m) for m in TOKENS]
        )
        cases += [
            ("fp8", name, shape, verify_fp8, shape, config)
            for name, config in named.items()
            for shape in RAGGED
        ]
        cases += [
            (
                "fp8",
                f"{name} {_epilogue_words(options)}",
                ragged,
                functools.partial(verify_fp8, **options),
                ragged,
                config,
            )
            for options, chosen in finished
            for name, config in chosen.items()
        ]
    cases += [
        ("emulated", " x ".join(dict.fromkeys(forms)), shape, verify_emulated, forms, shape)
        for forms in [*((form, form) for form in FORMS), ("mxfp8_e4m3", "mxfp4")]
        for shape in (((130, 200, 256), (65, 133, 96)) if here.has_tma else ((20, 24, 64),))
    ]
    cases += [
        ("decode", f"M = {shape[0]}", shape, verify_decode, *shape)
        for shape in ([(m, 300, 4128) for m in (*TOKENS, 3, 33)] if here.has_tma else [(3, 40, 160)])
    ]
    return [
        {"path": path, "name": name, "shape": list(shape)} | verify(*arguments)
        for path, name, shape, verify, *arguments in cases
    ]


def sanitizer_cases() -> None:
    """Run fp8 in every configuration and epilogue, the emulated and the decode path on small cases, for a sanitizer.

    References are computed on the CPU. Raises AssertionError where a result is wrong.
    """
    named = fp8.configs() | {"split": SPLIT_CONFIG, "epilogue warps": EPILOGUE_CONFIG}
    rows = {
        f"fp8 {name}": verify_fp8((200, 200, 512), config, bias=True, reference_on="cpu")
        for name, config in named.items()
    }
    rows |= {
        f"fp8 {_epilogue_words(options)}": verify_fp8(
            (200, 256, 256), Fp8Config(), **options, reference_on="cpu"
        )
        for options in EPILOGUES[2:]
    }
    rows |= {f"emulated {form}": verify_emulated((form, form), (70, 136, 128), "cpu") for form in FORMS}
    rows |= {f"decode {m}": verify_decode(m, 300, 1056, reference_on="cpu") for m in (3, 16)}
    wrong = [f"{name}: {row['reason']}" for name, row in rows.items() if row["status"] != "ok"]
    if wrong:
        raise AssertionError("; ".join(wrong))
