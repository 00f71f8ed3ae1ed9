"""Claims of the field note "TMA Setup Guide for Grace-Blackwell GB10"."""

from __future__ import annotations

from ch14.compiled.lesson import workloads
from claims import builds
from claims.judge import (
    ARGUMENT,
    ARITHMETIC,
    BUILT,
    DATASHEET,
    UNTESTED,
    Finding,
    Note,
    Quote,
    decide,
    format_range,
    is_at_least,
    is_within,
)
from tilelab.course import doctor
from tilelab.runtime import device, tensor_map

NOTE = Note(
    "TMA Setup Guide for Grace-Blackwell GB10",
    "GB10",
    "The note says how to switch TMA on for a GB10 with PyTorch 2.9 and Triton 3.5.0, and which speeds to "
    "expect. "
    "The note is unsigned and undated.",
)
GB10, H200 = device.KNOWN["GB10"], device.KNOWN["H200"]
GB10_FP4_SPARSE_TFLOPS = 1000  # NVIDIA DGX Spark datasheet: "up to 1 PFLOP of FP4", with sparsity
# github.com/Dao-AILab/flash-attention, "FlashAttention-3 beta release", Requirements
FLASH_ATTENTION_3_GPUS = "H100 / H800"
# Nsight Systems User Guide, --trace=cuda and --trace=nvtx
NSYS_TRACES = ("calls of the CUDA API", "kernels and copies with their times", "NVTX ranges")
BANDWIDTH = ("ch07_bulk_copy", "The floor, and the figures")
VARIABLES = ("ch14_descriptors", "The note's GPU and its variables")
COMPILED = ("ch14_compiled", "The cost of max-autotune")
TEMPLATE = ("ch14_compiled", "Open the template: a product with TMA")
EXPECTED, VERSIONS = "Expected Performance Gains", ("ch14_bug_hunt", "Which versions, which GPUs")


@NOTE.claim(
    "A GB10 has HBM3e with 1.5 TB/s, of which 900 to 1,350 GB/s are reached.",
    (
        Quote("HBM3e (1.5 TB/s per GPU)", "System Configuration"),
        Quote("~85-90% of peak (1275-1350 GB/s)", EXPECTED),
    ),
    VARIABLES,
    "the datasheet names HBM3e and at least 1,500 GB/s",
    DATASHEET,
    "NVIDIA GB10",
)
def memory(evidence):
    return decide(
        GB10.memory == "HBM3e" and GB10.peak_gbps >= 1500,
        f"It has {GB10.memory} with {GB10.peak_gbps} GB/s ({GB10.source}). The note's rates are "
        f"{format_range((900 / GB10.peak_gbps, 1350 / GB10.peak_gbps), '.1f')} times this.",
    )


def bandwidth_percent(evidence, tma: bool) -> list[float]:
    """Return the percentage of the datasheet's bandwidth that the fastest copy and the fastest a x + y reach."""
    return [
        100
        / H200.peak_gbps
        * max(
            row["gbps"] for row in evidence("ch07_bulk_speed", op=op) if row["name"].startswith("bulk") == tma
        )
        for op in ("copy", "axpy")
    ]


@NOTE.claim(
    "With TMA a kernel reaches 85 to 90 % of the memory's peak.",
    Quote("With TMA**: ~85-90% of peak", EXPECTED),
    BANDWIDTH,
    "a copy and a x + y by TMA reach 85 % or more, in every order of their chunks",
)
def with_tma(evidence):
    percent = bandwidth_percent(evidence, tma=True)
    orders = [
        100 / H200.peak_gbps * row["gbps"]
        for row in evidence("ch07_bulk_fronts", op="copy")
        if row["config"].startswith("bulk")
    ]
    figure = (
        f"The fastest reach {format_range(percent, '.0f')} % of an H200's peak, and a copy by TMA reaches "
        f"{format_range(orders, '.0f')} %, by the order of its chunks."
    )
    # A kernel that is faster than the claim says does not refute it: seven recordings gave 91.3 to 91.9 %.
    inside = all(is_within(each, 85, 100) for each in percent)
    return decide(
        inside and all(is_within(each, 85, 100) for each in orders),
        figure,
        "neighbouring chunks are read at the same time",
        inside,
    )


@NOTE.claim(
    "Without TMA a kernel reaches 60 to 70 % of the memory's peak.",
    Quote("Without TMA**: ~60-70% of peak", EXPECTED),
    BANDWIDTH,
    "the fastest copy and the fastest a x + y without TMA reach 60 to 70 %",
)
def without_tma(evidence):
    percent = bandwidth_percent(evidence, tma=False)
    return decide(
        all(is_within(each, 60, 70) for each in percent),
        f"Loads of 16 bytes per thread reach {format_range(percent, '.0f')} % of an H200's peak.",
    )


@NOTE.claim(
    "A GB10 multiplies at 150 TFLOP/s with torch.compile and at more than 200 with max-autotune.",
    Quote("torch.compile (max-autotune) | 200+ TFLOPS", EXPECTED),
    ("00_start", "Ask for capabilities, not for names"),
    "the datasheet allows 200 TFLOP/s in bf16",
    ARITHMETIC,
    "NVIDIA GB10, datasheet",
)
def gb10_products(evidence):
    dense = GB10_FP4_SPARSE_TFLOPS / 2 / 2 / 2  # without sparsity, in fp8, in bf16
    return decide(
        dense >= 200,
        f"The datasheet's 1 PFLOP/s is for FP4 with sparsity. Dense bf16 is an eighth of it or "
        f"less, {dense:.0f} TFLOP/s.",
    )


def product_speed(evidence, mode: str) -> float:
    """Return the speed of a 4096 cubed product in a mode of torch.compile, over eager."""
    return evidence("ch14_compiled_cells", workload="matmul", name=mode)[0]["ratio"]


@NOTE.claim(
    "`torch.compile` makes a matrix product 1.5 times as fast as eager.",
    Quote("torch.compile (default) | 150 TFLOPS | 1.5x", EXPECTED),
    COMPILED,
    "a 4096³ product in bf16 gains at least 1.5 times",
)
def compile_gain(evidence):
    speed = product_speed(evidence, "default")
    return decide(is_at_least(speed, 1.5), f"It runs at {speed:.2f} × eager at 4096³.")


@NOTE.claim(
    "`max-autotune` makes a matrix product at least twice as fast as eager.",
    Quote("200+ TFLOPS | 2.0x+", EXPECTED),
    COMPILED,
    "a 4096³ product in bf16 gains at least 2 times",
)
def autotune_gain(evidence):
    with_graph, without = (product_speed(evidence, mode) for mode in ("max-autotune", workloads.TUNED))
    return decide(
        is_at_least(max(with_graph, without), 2),
        f"It runs at {with_graph:.2f} × eager at 4096³, and at {without:.2f} × without its CUDA graph.",
    )


@NOTE.claim(
    "`max-autotune` adds TMA that eager lacks.",
    (
        Quote("Just compile with max-autotune - TMA automatically engaged!", "Method 1"),
        Quote("Use `mode='max-autotune'` for torch.compile", "3. Best Practices"),
    ),
    TEMPLATE,
    "max-autotune offers a kernel with descriptors where eager executes no TMA instruction",
)
def autotune_adds_tma(evidence):
    offering = sorted(
        {row["name"] for row in evidence("ch14_compiled_choices", whose="Triton, persistent TMA")}
    )
    eager = evidence("ch14_compiled_ncu", workload="matmul", name="eager")[0]["UTMALDG"]
    adds = "max-autotune" in offering and not eager
    offers = workloads.offers_triton_gemm(GB10.sms)
    gb10 = (
        ""
        if offers
        else f" On a GB10 torch would try no Triton product at all: {GB10.sms} SMs are too few for it."
    )
    return decide(
        adds,
        f"Only {' and '.join(offering)} try descriptors, while eager's cuBLAS already executes UTMALDG "
        f"{eager:,} times.{gb10}",
    )


@NOTE.claim(
    "FlashAttention-3 runs on a GB10.",
    Quote("FlashAttention-3 + TMA", EXPECTED),
    ("ch14_attention", "The ladder"),
    "its authors name a GPU of compute capability 12.1",
    ARGUMENT,
    "README of FlashAttention",
)
def flash_attention_3_on_gb10(evidence):
    return decide(
        any(name in FLASH_ATTENTION_3_GPUS for name in ("GB10", "DGX Spark", "12.1")),
        "Its authors require "
        f"an {FLASH_ATTENTION_3_GPUS} GPU; the kernels use wgmma, which a GB10 does not have.",
    )


def is_flash_attention_3_or_4(row: dict) -> bool:
    return row["name"].startswith(("FlashAttention-3", "FlashAttention-4"))


@NOTE.claim(
    "FlashAttention-3 with TMA is 2.0 to 2.5 times as fast as standard attention.",
    Quote("FlashAttention-3 + TMA | 20-25 ms | 2.0-2.5x", EXPECTED),
    ("ch14_attention", "The ladder"),
    "FlashAttention-3, or its successor's Hopper kernel, is 2.0 to 2.5 times as fast as attention in steps",
)
def attention(evidence):
    rows = evidence("ch14_attention_ladder", causal=False)
    peers = evidence.find("ch14_attention_peers", causal=False, status="ok", shape=rows[0]["shape"])
    speed = {row["name"]: row["ratio"] for row in (rows, peers)[any(map(is_flash_attention_3_or_4, peers))]}
    measured = next((name for name in speed if is_flash_attention_3_or_4({"name": name})), None)
    if measured is None:
        return Finding(
            UNTESTED,
            f"FlashAttention-2, without TMA, runs at {speed['flash'] / speed['eager']:.1f} × "
            f"attention in steps, and cuDNN, with TMA, at {speed['cuDNN'] / speed['eager']:.1f} ×.",
            "FlashAttention-3 was not measured",
        )
    over_eager, over_flash = speed[measured] / speed["eager"], speed[measured] / speed["flash"]
    return decide(
        is_within(over_eager, 2, 2.5),
        f"{measured} runs at {over_eager:.1f} × attention in steps and {over_flash:.1f} × FlashAttention-2.",
        "standard means FlashAttention-2",
        is_within(over_flash, 2, 2.5),
    )


@NOTE.claim(
    "With Triton 3.5 on a GB10, BLOCK_K = 32 with one stage and four warps avoids a compiler crash.",
    Quote("Must use conservative settings", "1. Triton 3.5 Compiler Bug"),
    VERSIONS,
    "loops with BLOCK_K = 64, 4 stages and 8 warps fail to compile although a ptxas that knows a GB10 is named",
    BUILT,
    "sm_121a (GB10), Triton 3.5.0, ptxas of CUDA 13",
)
def conservative_settings(evidence):
    rows = evidence("ch14_bug_hunt_ptxas")
    failures = [row for row in rows if row["outcome"] == "fails"]
    own = [
        row
        for row in evidence("ch14_bug_hunt_matrix", target="sm_121a", triton="3.5.0", hunt="loop")
        if "gpu-name" in row.get("message", "")
    ]
    return decide(
        failures,
        f"With the ptxas of CUDA 13, {len(failures)} of {len(rows)} loops with BLOCK_K = 64, 4 "
        "stages and 8 warps fail. The ptxas that Triton 3.5.0 brings refuses "
        f"{len(own)} of them for the name of the target, which no setting changes.",
    )


@NOTE.claim(
    "Triton 3.5.0 builds TMA kernels for a GB10.",
    Quote("Configured Triton 3.5 for SM 12.1 target", "1. ✅ Updated arch_config.py"),
    VERSIONS,
    "all loops by descriptor build for sm_121a with Triton 3.5.0 as pip installs it",
    BUILT,
    "sm_121a (GB10), Triton 3.5.0",
)
def triton_for_gb10(evidence):
    own, newer = (
        [row["outcome"] for row in rows]
        for rows in (
            evidence("ch14_bug_hunt_matrix", target="sm_121a", hunt="loop", triton="3.5.0", LOADS="device"),
            evidence("ch14_bug_hunt_ptxas", LOADS="device"),
        )
    )
    return decide(
        set(own) == {"builds"},
        f"{own.count('builds')} of {len(own)} loops build with the ptxas that "
        "Triton 3.5.0 "
        f"brings, and {newer.count('builds')} of {len(newer)} with the ptxas of CUDA 13.",
        "`TRITON_PTXAS_PATH` names the ptxas of CUDA 13",
        set(newer) == {"builds"},
    )


@NOTE.claim(
    "The guide's Triton kernel with `make_tensor_descriptor` runs as printed.",
    Quote("input_desc = tl.make_tensor_descriptor(", "Method 2"),
    ("ch14_descriptors", "What each rule is for"),
    "a kernel that makes a descriptor runs without further set-up",
    about="",
)
def listing_runs(evidence):
    outcome = evidence("ch14_descriptors_rules", rule="an allocator is set")[0]["device"]
    if outcome.startswith("right"):
        return decide(True, "Its result is right without an allocator.")
    return decide(
        False,
        f'Without triton.set_allocator it ends with "{outcome.split(": ", 1)[1].split(",")[0]}".',
        "an allocator is set before",
        True,
    )


@NOTE.claim(
    "The guide's CUDA kernel compiles as printed and waits for its data.",
    Quote("barrier.wait();", "Method 3"),
    ("ch10_tile_pipeline", "Step 1: one load and one store"),
    "its three statements compile and announce the bytes that the barrier shall wait for",
    BUILT,
    "sm_121a (GB10), NVRTC",
)
def cuda_listing_runs(evidence):
    error = builds.method_3_error()
    return decide(
        not error and "arrive_tx" in builds.METHOD_3,
        f'It ends with "{error}": `wait` takes the token of '
        "an arrival. The listing has no arrival and announces no bytes (`expect_tx`), so nothing would wait "
        "for the load."
        if error
        else "It compiles.",
    )


@NOTE.claim(
    "`TRITON_TMA_ENABLE`, `TRITON_CUDNN_ALGOS` and `DISABLE_TMA` switch TMA and cuDNN's algorithms.",
    (Quote("TRITON_TMA_ENABLE=1", "Environment Variables"), Quote("DISABLE_TMA=1", "Environment Variables")),
    VARIABLES,
    "Triton or torch reads each of them",
    ARGUMENT,
    "files of the installed Triton and torch",
)
def variables_that_switch(evidence):
    found = builds.variables_read("TRITON_TMA_ENABLE", "TRITON_CUDNN_ALGOS", "DISABLE_TMA")
    readers = [variable for variable, packages in found.items() if packages]
    return decide(
        len(readers) == len(found),
        f"{len(readers)} of the {len(found)} names occur in a source file or library of either package.",
    )


@NOTE.claim(
    "`TORCH_CUDNN_V8_API_ENABLED=1` and `TRITON_ALWAYS_COMPILE=0` have to be set.",
    Quote("TORCH_CUDNN_V8_API_ENABLED=1", "Environment Variables"),
    VARIABLES,
    "each is read, and the guide's value differs from the default",
    ARGUMENT,
    "files of the installed Triton and torch",
)
def variables_without_effect(evidence):
    found = builds.variables_read("TORCH_CUDNN_V8_API_ENABLED", "TRITON_ALWAYS_COMPILE")
    read = bool(found["TORCH_CUDNN_V8_API_ENABLED"])
    return decide(
        read and builds.always_compiles(),
        f"torch {'reads' if read else 'no longer reads'} the first one, and 0 is the default of the second.",
    )


@NOTE.claim(
    "`nsys profile` shows whether TMA is used.",
    (
        Quote("Profile with Nsight Systems to verify TMA usage", "3. Best Practices"),
        Quote("nsys profile --trace=cuda,nvtx", "Quick Start"),
    ),
    COMPILED,
    "what that command traces names the instructions of a kernel",
    ARGUMENT,
    "Nsight Systems User Guide, --trace",
)
def nsys(evidence):
    return decide(
        "instructions" in NSYS_TRACES,
        f"It traces {', '.join(NSYS_TRACES)}. Instructions are counted by "
        "Nsight Compute or read in the SASS.",
    )


@NOTE.claim(
    "Driver 550 is new enough for CUDA 13.",
    Quote("Update NVIDIA driver to 550+", "Runtime errors"),
    ("00_start", "Prove the tool chain"),
    "CUDA 13 asks for driver 550 or an older one",
    DATASHEET,
    "CUDA 13 Toolkit Release Notes",
)
def driver(evidence):
    return decide(doctor.MIN_DRIVER <= 550, f"CUDA 13 needs driver {doctor.MIN_DRIVER} or newer.")


@NOTE.claim(
    "CUDA has a bug in TMA descriptors of one dimension.",
    Quote("CUDA 1D TMA descriptor bug", "Bug Reproduction"),
    ("ch10_tile_pipeline", "The rules of a map"),
    "the note's program fails although it keeps the rules of a descriptor",
    ARGUMENT,
    "rules of a tensor map",
)
def one_dimension(evidence):
    try:
        tensor_map.check_describable((65536,), (1,), 4, 4096, (1024,))
        outcome = "A box of 1,024 elements is accepted."
    except ValueError as error:
        outcome = f'A frequent cause is a box of 1,024 elements: "{str(error).rstrip(".")}".'
    return Finding(UNTESTED, outcome, "the program is not in the note")


@NOTE.claim(
    "CUDA has a bug in TMA pipelines of two dimensions.",
    Quote("CUDA 2D TMA pipeline bug", "Bug Reproduction"),
    ("ch10_tile_pipeline", "Check before timing"),
    "the note's program gives wrong results although it keeps the rules",
)
def two_dimensions(evidence):
    right, cases = (
        sum(row["cases"] for row in evidence("ch10_tile_check", **wanted))
        for wanted in ({"status": "ok"}, {})
    )
    return Finding(
        UNTESTED,
        f"On an H200 {right} of {cases} cases of this course's pipelines are right.",
        "the program is not in the note, and no GB10 was measured",
    )
