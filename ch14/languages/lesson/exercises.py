"""Inputs and checks for the exercises of `notebooks/19_ch14_languages.ipynb`."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.nn.functional as F

from ch14.languages import TITLES, configs
from ch14.languages.lesson import experiments, worker
from tilelab.cells import cuda_magic, lesson
from tilelab.emulator import gluon
from tilelab.measure.check import NotChecked, make_checker
from tilelab.runtime import device

CASES = {
    "cpu": [(200, 264, 136), (200, 264, 40), (1, 136, 72)],
    "cuda": [(300, 264, 136), (2048, 1496, 512)],
}  # (M, N, K)
SMALL = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3, "GROUP_M": 2}
SMALL_RING = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "STAGES": 3, "GROUP_M": 2}
LISTINGS = ("helion", "cutile")  # whose SASS the last exercise shows, in this order


def spec(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return SiLU(A B + bias) in float64."""
    return F.silu(a.double() @ b.double() + bias.double())


def make_case(case: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return a (M, K) and b = weight.T (K, N) in bf16, bias (N) in float32, and out (M, N) in bf16."""
    m, n, k = case
    a, weight = (torch.randn(rows, k, device=where).bfloat16() for rows in (m, n))
    return a, weight.T, torch.randn(n, device=where), torch.empty(m, n, dtype=torch.bfloat16, device=where)


def prepare_cuda(text: str):
    """Return a `prepare(a, b, bias, out)` of a CUDA C++ cell, for the GPU or the emulator."""
    constants = {"BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3, "GROUP_M": 2}
    kernels = cuda_magic.find_kernels(text, [f"-D{name}={value}" for name, value in constants.items()])
    if "gemm" not in kernels:
        raise ValueError("the cell must define the kernel `gemm`")

    def prepare(a, b, bias, out):
        maps = [
            cuda_magic.make_tensor_map(matrix, (64, 64), swizzle="128B", l2_promotion="128B")
            for matrix in (a, b.T, out)
        ]
        smem = 3 * 2 * 64 * 128 + 64 * 64 * 2 + 16 * 3
        arguments = (*maps, len(a), b.shape[1], a.shape[1], bias)
        return kernels["gemm"].prepare(3, 256, arguments, smem)

    return prepare


def prepare_text(name: str, text: str):
    """Return the `prepare(a, b, bias, out)` of a cell in CUDA C++, Triton or Gluon, which run without a GPU, too."""
    if name == "cuda":
        return prepare_cuda(text)
    names = lesson.define(text)
    if name == "triton":
        return functools.partial(names["prepare"], **SMALL)
    from ch14.languages.kernels import gluon_host

    gluon.enable()
    return functools.partial(gluon_host.prepare, names["gemm"], **SMALL_RING)


def choose_config(name: str) -> dict:
    """Return a language's best configuration at 4096 cubed, or its first one if none is recorded."""
    with contextlib.suppress(FileNotFoundError):
        record = experiments.measure_speed.load()
        return (
            experiments.find_row(record, "speed", name, experiments.SQUARE).get("config")
            or configs.CONFIGS[name][0]
        )
    return configs.CONFIGS[name][0]


def check_epilogue(name: str, text: str) -> None:
    """Raise AssertionError unless a kernel adds a bias and applies SiLU, on ragged sizes, wherever it can run."""
    if name not in TITLES:
        raise ValueError(f"choose one of {', '.join(TITLES)}; it is {name!r}")
    if {"cuda": "__global__", "gluon": "def gemm", "cute": "def gemm"}.get(name, "def prepare") not in text:
        raise NotImplementedError
    has_gpu = device.current().has_tma
    if name in ("cuda", "triton") or (name == "gluon" and not has_gpu):
        return lesson.require_launch(prepare_text(name, text), CASES, make_case, spec)
    if not worker.is_installed(name):
        raise NotChecked(f"{TITLES[name]} is not installed")
    with experiments.start_text(name, text) as language:
        if has_gpu:
            config = configs.CONFIGS[name][0]
            found = language.ask("check", 120, config=config, shapes=CASES["cuda"], epilogue=True)
        else:
            found = language.ask("compile", 240, config=choose_config(name), epilogue=True)
    assert found["status"] == "ok", found.get("reason") or "the result is wrong"
    if not has_gpu:
        raise NotChecked(f"it compiles for Hopper, {worker.describe_code(found)}; its result needs a GPU")


def check_spill(config: dict) -> None:
    """Raise AssertionError unless a configuration of cuTile keeps more sums per thread than there are registers."""
    if not config:
        raise NotImplementedError
    assert config in configs.CONFIGS["cutile"], "it must be one of cuTile's 24 configurations"
    sums = (
        config["BLOCK_M"] * config["BLOCK_N"] / (32 * config["num_worker_warps"]) / config.get("num_ctas", 1)
    )
    assert sums > 255, f"each thread keeps {sums:.0f} sums, which fit into its 255 registers"


def show_listings(record) -> None:
    """Print the first loads, products and barriers in the SASS of two languages, without `BAR.SYNC`."""
    for place, name in enumerate(LISTINGS, 1):
        listing = experiments.find_row(record, "code", name).get("listing", [])
        shown = [line for line in listing if "BAR.SYNC" not in line][:26]
        print(f"listing {place}:", *shown, sep="\n    ")


def check_listings(answers: dict[int, str]) -> None:
    """Raise AssertionError unless the languages of both listings are named."""
    if not answers:
        raise NotImplementedError
    wrong = [
        place for place, name in enumerate(LISTINGS, 1) if answers.get(place) not in (name, TITLES[name])
    ]
    assert not wrong, f"listing {wrong[0]} is of another language"


CHECKS = {
    "Exercise 1": check_epilogue,
    "Exercise 2": check_epilogue,
    "Exercise 3": check_spill,
    "Exercise 4": check_listings,
}
check = make_checker(CHECKS)
