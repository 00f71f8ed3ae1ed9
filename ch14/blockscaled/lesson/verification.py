"""Check every path of `ch14.blockscaled` against float64, in poisoned memory and on ragged shapes.

Without a GPU, the paths that Triton's interpreter runs are checked.
"""

from __future__ import annotations

import dataclasses
import functools

from ch14 import fp4_decode, fp8_gemm
from ch14.blockscaled import emulated
from ch14.fp4_decode.lesson.verification import TOKENS, make_packed, places, verify_decode
from ch14.fp8_gemm.configs import Fp8Config
from ch14.fp8_gemm.lesson.verification import (
    BF16,
    EPILOGUE_CONFIG,
    EPILOGUES,
    SPLIT_CONFIG,
    epilogue_words,
    fp8_jobs,
    judge,
    verify_fp8,
)
from tilelab.measure import check
from tilelab.runtime import build, device

FORMS = ("mxfp8_e4m3", "mxfp4", "nvfp4")

RAGGED = ((1, 64, 128), (300, 328, 640), (1000, 640, 1664))


def verify_emulated(forms: tuple[str, str], shape, reference_on: str = "cuda") -> dict:
    """Check the emulated path against float64."""
    (m, n, k), (where, reference_on) = shape, places(reference_on)
    made = [make_packed(form, rows, k, reference_on) for rows, form in zip((m, n), forms)]
    a, weight = (
        dataclasses.replace(matrix, **{name: tensor.to(where) for name, tensor in matrix.tensors().items()})
        for matrix in made
    )
    out, touched = check.make_poisoned((m, n), BF16, where)
    emulated.prepare(a, weight.T, out=out)()
    return judge(out, emulated.spec(made[0], made[1].T), touched)


def check_correctness() -> list[dict]:
    """Return a row {path, name, shape, status, ...} for every check of every path on ragged shapes."""
    # (path, name, shape, check and its arguments)
    cases, here, ragged = ([], device.current(), (333, 384, 640))
    if here.has_wgmma:

        def choose(packed: bool) -> dict:
            return {"best": fp8_gemm.best_config(*ragged, here.sms, packed), "split": SPLIT_CONFIG}

        named = fp8_gemm.configs() | choose(False) | {"epilogue warps": EPILOGUE_CONFIG}
        finished = [(options, choose(options.get("packed", False))) for options in EPILOGUES]
        jobs = fp8_jobs(named.values()) + [
            job for options, chosen in finished for job in fp8_jobs(chosen.values(), options)
        ]
        build.compile_ahead(
            jobs
            + [fp4_decode.job(fp4_decode.best_config(m, 300, 4128, here), here.target, m) for m in TOKENS]
        )
        cases += [
            ("fp8", name, shape, verify_fp8, shape, config)
            for name, config in named.items()
            for shape in RAGGED
        ]
        for options, chosen in finished:
            check, words = functools.partial(verify_fp8, **options), epilogue_words(options)
            for name, config in chosen.items():
                cases.append(("fp8", f"{name} {words}", ragged, check, ragged, config))
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
    named = fp8_gemm.configs() | {"split": SPLIT_CONFIG, "epilogue warps": EPILOGUE_CONFIG}
    rows = {
        f"fp8 {name}": verify_fp8((200, 200, 512), config, bias=True, reference_on="cpu")
        for name, config in named.items()
    }
    rows |= {
        f"fp8 {epilogue_words(options)}": verify_fp8(
            (200, 256, 256), Fp8Config(), **options, reference_on="cpu"
        )
        for options in EPILOGUES[2:]
    }
    rows |= {f"emulated {form}": verify_emulated((form, form), (70, 136, 128), "cpu") for form in FORMS}
    rows |= {f"decode {m}": verify_decode(m, 300, 1056, reference_on="cpu") for m in (3, 16)}
    check.require_right(rows)
