"""Every path of `ch14.blockscaled` against float64, in poisoned memory, on ragged shapes; without a GPU those that
Triton's interpreter runs."""

from __future__ import annotations

import dataclasses
import math

import torch

from ch14 import mx_formats
from ch14.blockscaled import __main__ as command
from ch14.blockscaled import decode, emulated, fp8
from ch14.blockscaled.fp8 import Fp8Config
from ch14.mx_formats import Packed, number_formats
from tilelab import build, check, device

FORMS = ("mxfp8_e4m3", "mxfp4", "nvfp4")
TOKENS = (1, 2, 4, 8, 16, 32, 64)
RAGGED = ((1, 128, 128), (300, 384, 640), (1000, 640, 1664))
BF16 = torch.bfloat16


def scaled(m: int, n: int, k: int, where="cuda") -> list[torch.Tensor]:
    """Random A (M, K) and B (N, K) in fp8 with their scales, and room for C: what `blockscaled_fp8.prepare` and torch
    take, the scales of A column by column, each column at a multiple of 16 bytes."""
    a, b = (number_formats.quantise(torch.randn(rows, k, device=where), number_formats.lookup(form))
            for rows, form in ((m, "fp8_1x128"), (n, "fp8_128x128")))
    scale_a = torch.empty(k // 128, math.ceil(m / 4) * 4, device=where)[:, :m].copy_(a.scales.T).T
    values = [of.codes.view(torch.float8_e4m3fn) for of in (a, b)]
    return [*values, scale_a, b.scales, torch.empty(m, n, dtype=BF16, device=where)]


def judge(out, reference, touched, tolerance: float = check.TOLERANCE[BF16], also: str = "") -> dict:
    """{status, reason, error, tolerance} of a result in poisoned memory."""
    error = check.relative_error(out, reference.to(out.device))
    reason = touched() or also or ("" if error <= tolerance else f"the error {error:.1e} is above {tolerance:.1e}")
    return {"status": "wrong" if reason else "ok", "reason": reason, "tolerance": tolerance} | (
        {"error": error} if math.isfinite(error) else {})


def verify(shape, config="best", bias: bool = False, activation: str | None = None, packed: bool = False,
           reference_on: str = "cuda") -> dict:
    """The fp8 kernel against float64, three launches of it, and bit for bit against `mx_formats.quantise` of the bf16
    result where the output is `packed`."""
    made = scaled(*shape, where=reference_on)[:4]
    vector = torch.randn(shape[1], device=reference_on).to(BF16) if bias else None
    wanted = fp8.spec(*made, vector, activation)
    a, b, scale_a, scale_b = (each.cuda() for each in made)  # keeps strides
    options = dict(bias=None if vector is None else vector.cuda(), activation=activation, config=config)
    out, touched = check.make_poisoned(shape[:2], BF16, "cuda")
    launch = fp8.prepare(a, b, scale_a, scale_b, out=out, **options)
    first = launch().clone()
    for _ in range(2):
        launch()
    also = "" if torch.equal(first, out) else "another launch gives other bits"
    if packed:
        room = mx_formats.empty(shape[:2], "mxfp8_e4m3", "cuda")
        room.values.fill_(0x7F), room.scales.fill_(0x7F)
        fp8.fp8(a, b, scale_a, scale_b, out=room, **options)
        same = mx_formats.quantise(out, "mxfp8_e4m3")
        if not (torch.equal(room.values, same.values) and torch.equal(room.scales, same.scales)):
            also = also or "quantised in the epilogue it has other bits than quantised apart"
    return judge(out, wanted, touched, also=also)


def _on(of: Packed, where: str) -> Packed:
    given = {name: getattr(of, name) for name in ("values", "scales", "pair")}
    return dataclasses.replace(of, **{name: t if t is None else t.to(where) for name, t in given.items()})


def verify_emulated(forms: tuple[str, str], shape, reference_on: str = "cuda") -> dict:
    """The emulated path against float64; in Triton's interpreter where there is no GPU."""
    (m, n, k), where = shape, "cuda" if device.current().has_tma else "cpu"
    a, b = (mx_formats.quantise(torch.randn(rows, k, device=where).to(BF16), form)
            for rows, form in zip((m, n), forms))
    wanted = emulated.spec(*(_on(each, reference_on if where == "cuda" else "cpu") for each in (a, b)))
    out, touched = check.make_poisoned((m, n), BF16, where)
    emulated.prepare(a, b, out=out)()
    return judge(out, wanted, touched)


def verify_decode(m: int, n: int, k: int, config=None, reference_on: str = "cuda") -> dict:
    """The decode path against float64; in Triton's interpreter where there is no GPU."""
    where = "cuda" if device.current().has_tma else "cpu"
    reference_on = reference_on if where == "cuda" else "cpu"
    x = torch.randn(m, k, device=reference_on).to(BF16)
    of = number_formats.quantise(torch.randn(n, k, device=reference_on), number_formats.lookup("mxfp4"))
    packed = (of.codes[:, ::2] | of.codes[:, 1::2] << 4).contiguous()
    wanted = decode.spec(x, packed, of.scales)
    out, touched = check.make_poisoned((m, n), BF16, where)
    decode.decode(x.to(where), packed.to(where), of.scales.to(where), out=out, config=config)
    return judge(out, wanted, touched)


EPILOGUES = (dict(bias=True), dict(bias=True, activation="silu"), dict(bias=True, activation="silu", packed=True),
             dict(activation="gelu", packed=True))
SHARED = fp8.best(64, 128, 128 * 96, 3, mx=True)  # K steps shared by three CTAs


def _words(options: dict) -> str:
    return " + ".join(key if value is True else str(value) for key, value in options.items())


def fp8_jobs(configs, options: dict | None = None) -> list[build.Job]:
    """The compilations that `verify` needs of each configuration, with an epilogue of EPILOGUES or none."""
    options = options or {}
    return [fp8.job(config, "sm_90a", options.get("bias", False), options.get("activation"), mx)
            for config in configs for mx in sorted({False, options.get("packed", False)})]


def checked() -> list[dict]:
    """Every path on ragged shapes against float64, here and now; without a GPU the emulated and the decode path in
    Triton's interpreter."""
    rows = []

    def add(path, name, shape, found):
        rows.append({"path": path, "name": name, "shape": list(shape)} | found)

    live = device.current().has_tma
    if live and device.current().has_wgmma:
        here, ragged = device.current(), (333, 384, 640)
        finished = {"best": fp8.best(*ragged, here.sms), "split": SHARED}
        named = fp8.configs() | finished
        build.compile_ahead([job for options in (None, *EPILOGUES)
                    for job in fp8_jobs((finished if options else named).values(), options)]
                   + [decode.job(decode.best(m, 300, 4128, here), here.target, m)
                      for m in TOKENS])
        for shape in RAGGED:
            for name, config in named.items():
                add("fp8", name, shape, verify(shape, config))
        for options in EPILOGUES:
            for name, config in finished.items():
                add("fp8", f"{name} {_words(options)}", ragged, verify(ragged, config, **options))
    for forms in [(form, form) for form in FORMS] + [("mxfp8_e4m3", "mxfp4")]:
        for shape in ((130, 200, 256), (65, 133, 96)) if live else ((20, 24, 64),):
            add("emulated", " x ".join(dict.fromkeys(forms)), shape, verify_emulated(forms, shape))
    for m, n, k in [(m, 300, 4128) for m in (*TOKENS, 3, 33)] if live else [(3, 40, 160)]:
        add("decode", f"M = {m}", (m, n, k), verify_decode(m, n, k))
    for row in batched() if live else []:
        add("emulated", "command line, L = 3", row["shape"], {key: row[key] for key in ("status", "reason")})
    return rows


def batched(count: int = 3) -> list[dict]:
    """L products by the command line, in the words of CUTLASS's example; its rows."""
    words = f"--mnkl 300,264,512,{count} --ab_dtype Float4E2M1FN --sf_dtype Float8E8M0FNU --sf_vec_size 16 --json -"
    # Not its `main` with standard output caught: that is the whole process's, and other threads may print.
    return command._measured(command._arguments(words.split()))


def sanitizer_cases() -> None:
    """fp8 in every configuration and with every epilogue, the emulated and the decode path, on small and ragged cases,
    for a sanitizer to watch; AssertionError when one is wrong. The reference is computed on the CPU."""
    rows = {}
    for name, config in (fp8.configs() | {"split": SHARED}).items():
        rows[f"fp8 {name}"] = verify((200, 256, 512), config, reference_on="cpu")
    for options in EPILOGUES[2:]:
        rows[f"fp8 {_words(options)}"] = verify((200, 256, 256), Fp8Config(), **options, reference_on="cpu")
    for form in FORMS:
        rows[f"emulated {form}"] = verify_emulated((form, form), (70, 136, 128), "cpu")
    for m in (3, 16):
        rows[f"decode {m}"] = verify_decode(m, 300, 1056, reference_on="cpu")
    wrong = [f"{name}: {row['reason']}" for name, row in rows.items() if row["status"] != "ok"]
    if wrong:
        raise AssertionError("; ".join(wrong))
