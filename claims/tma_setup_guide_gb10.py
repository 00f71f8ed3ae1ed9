"""Claims of the field note "TMA Setup Guide for Grace-Blackwell GB10"."""

from __future__ import annotations

import functools

from ch14 import compiled
from ch14.descriptors.experiments import find_words
from claims.judge import UNTESTED, Finding, Note, decide, format_range
from tilelab import device, doctor, tensor_map

NOTE = Note("TMA Setup Guide for Grace-Blackwell GB10")
GB10, H200 = device.KNOWN["GB10"], device.KNOWN["H200"]
VARIABLES = "The note's GPU and its variables"


@NOTE.claim("GB10's memory is HBM3e with 1.5 TB/s.", "00_start", "Ask for capabilities, not for names")
def memory(evidence):
    return decide(GB10.memory == "HBM3e" and GB10.peak_gbps >= 1500,
                  f"{GB10.memory}, {GB10.peak_gbps} GB/s ({GB10.source})")


@NOTE.claim("A GB10 moves 900 to 1,350 GB/s.", "ch14_descriptors", VARIABLES)
def rates(evidence):
    times = format_range((900 / GB10.peak_gbps, 1350 / GB10.peak_gbps), ".1f")
    return decide(GB10.peak_gbps >= 900, f"{times} × what its memory can do: no measurement")


def bandwidth_percent(evidence, tma: bool) -> list[float]:
    """Return the percentage of the datasheet's bandwidth that the fastest copy and the fastest a x + y reach."""
    return [100 / H200.peak_gbps * max(row["gbps"] for row in evidence("ch07_bulk_speed", op=op)
                                       if row["name"].startswith("bulk") == tma) for op in ("copy", "axpy")]


@NOTE.claim("With TMA 85 to 90 % of the memory's peak is reached.", "ch07_bulk_copy", "The floor, and the figures")
def with_tma(evidence):
    percent = bandwidth_percent(evidence, tma=True)
    ratios = [row["ratio"] for row in evidence("ch07_bulk_fronts", op="copy")]
    figure = (f"{format_range(percent, '.0f')} % of an H200's; {format_range(ratios)} × torch's copy by the order of "
              "chunks")
    return decide(min(percent) >= 85 and min(ratios) >= 0.95, figure, "chunks come in order", min(percent) >= 85)


@NOTE.claim("Without TMA it is 60 to 70 %.", "ch07_bulk_copy", "The floor, and the figures")
def without_tma(evidence):
    percent = bandwidth_percent(evidence, tma=False)
    return decide(max(percent) <= 75, f"{format_range(percent, '.0f')} % of an H200's, by 16-byte loads")


def product_speed(evidence, mode: str) -> float:
    """Return the speed of a 4096 cubed product in a mode of torch.compile, over eager."""
    return evidence("ch14_compiled_cells", workload="matmul", name=mode)[0]["ratio"]


@NOTE.claim("`torch.compile` makes a product 1.5 times as fast as eager.", "ch14_compiled", "Measure")
def compile_gain(evidence):
    speed = product_speed(evidence, "default")
    return decide(speed >= 1.5, f"{speed:.2f} × at 4096³")


@NOTE.claim("`max-autotune` makes it twice as fast, or more.", "ch14_compiled", "Measure")
def autotune_gain(evidence):
    with_graph, without = (product_speed(evidence, mode) for mode in ("max-autotune", compiled.TUNED))
    return decide(with_graph >= 2, f"{with_graph:.2f} × at 4096³, {without:.2f} without its CUDA graph")


@NOTE.claim("`max-autotune` engages TMA automatically.", "ch14_compiled", "No instruction, no claim")
def autotune_engages_tma(evidence):
    offering = sorted({row["name"] for row in evidence("ch14_compiled_choices", whose="Triton, persistent TMA")})
    eager = evidence("ch14_compiled_ncu", workload="matmul", name="eager")[0]
    return decide("max-autotune" in offering, f"descriptors are tried by {' and '.join(offering)} alone; eager's "
                  f"cuBLAS executes UTMALDG {eager['UTMALDG']:,} times as it is")


@NOTE.claim("On GB10, too, `max-autotune` is the way.", "ch14_compiled", "No instruction, no claim")
def autotune_on_gb10(evidence):
    offers = compiled.offers_triton_gemm(GB10.sms)
    return decide(offers, f"with {GB10.sms} SMs torch offers {'Triton products' if offers else 'no Triton product'}")


@NOTE.claim("FlashAttention-3 with TMA is 2.0 to 2.5 times as fast as standard attention.", "ch14_attention",
            "The ladder")
def attention(evidence):
    speed = {row["name"]: row["ratio"] for row in evidence("ch14_attention_ladder", causal=False)}
    over_eager, over_flash = speed["cuDNN"] / speed["eager"], speed["cuDNN"] / speed["flash"]
    figure = (f"cuDNN, by TMA: {over_eager:.1f} × step by step, {over_flash:.1f} × flash; ours, by TMA: "
              f"{speed['persistent'] / speed['flash']:.1f} × flash; flash, without TMA: "
              f"{speed['flash'] / speed['eager']:.1f} × step by step (FlashAttention-3 was not measured)")
    return decide(over_flash >= 2, figure, "standard means step by step", over_eager >= 2)


@NOTE.claim("Triton 3.5 crashes unless BLOCK_K is 32, with one stage and four warps.", "ch14_bug_hunt",
            "The note's rule against every build")
def conservative_settings(evidence):
    others = [row for row in evidence("ch14_bug_hunt_loop")
              if (row["BLOCK_K"], row["num_stages"], row["num_warps"]) != (32, 1, 4)]
    builds = [row["LOOP"] for row in others if row["outcome"] == "builds"]
    plain = sum(row["LOOP"] == "plain" for row in others)
    return decide(not builds, f"{len(builds)} of {len(others)} other builds succeed; of the plain loop, which it "
                              f"shows, {builds.count('plain')} of {plain}")


@NOTE.claim("Triton 3.5.0 builds TMA kernels for GB10.", "ch14_bug_hunt", "Which versions, which GPUs")
def triton_for_gb10(evidence):
    rows = evidence("ch14_bug_hunt_matrix", target="sm_121a", hunt="loop")
    old, new = ([row["outcome"] for row in rows if row["triton"] == triton] for triton in ("3.5.0", "3.6.0"))
    figure = (f"{old.count('builds')} of {len(old)} builds succeed with the ptxas that 3.5.0 brings, "
              f"{new.count('builds')} with that of 3.6.0")
    return decide(True, figure) if set(old) == {"builds"} else Finding(UNTESTED, figure, "another ptxas was not tried")


@NOTE.claim("Its Triton kernel with `make_tensor_descriptor` runs as printed.", "ch14_descriptors",
            "What each rule is for")
def listing_runs(evidence):
    outcome = evidence("ch14_descriptors_rules", rule="an allocator is set")[0]["device"]
    if outcome.startswith("right"):
        return decide(True, "right without an allocator")
    return decide(False, f"without: \"{outcome.split(': ', 1)[1].split(',')[0]}\"", "an allocator is set before")


VARIABLE_CLAIMS = {"TRITON_TMA_ENABLE": "`TRITON_TMA_ENABLE=1` enables TMA in Triton.",
                   "DISABLE_TMA": "`DISABLE_TMA=1` disables it.",
                   "TRITON_CUDNN_ALGOS": "`TRITON_CUDNN_ALGOS=1` enables cuDNN's algorithms."}


@functools.cache
def find_variables() -> dict[str, dict[str, bool]]:
    """Return, for triton and for torch, which variables occur in their source or libraries, gigabytes on a GPU."""
    return {package: find_words(package, list(VARIABLE_CLAIMS)) for package in ("triton", "torch")}


for variable, text in VARIABLE_CLAIMS.items():
    @NOTE.claim(text, "ch14_descriptors", VARIABLES, name=variable)
    def is_read(evidence, variable=variable):
        readers = [package for package, found in find_variables().items() if found[variable]]
        return decide(bool(readers), f"read by {' and '.join(readers)}" if readers else "in no file of Triton or torch")


@NOTE.claim("`nsys profile` verifies that TMA is used.", "ch14_compiled", "No instruction, no claim")
def nsys(evidence):
    count = {row["name"]: row["UTMALDG"] for row in evidence("ch14_compiled_ncu", workload="attention")}
    figure = f"a count does tell: UTMALDG {count['cuDNN']:,} in cuDNN's attention, {count['flash']:,} in flash"
    return Finding(UNTESTED, figure, "nsys was not run; that command traces kernels, not instructions")


@NOTE.claim("A driver from 550 on suffices for CUDA 13.", "00_start", "Prove the tool chain")
def driver(evidence):
    return decide(doctor.MIN_DRIVER <= 550, f"{doctor.MIN_DRIVER} or newer (CUDA 13 Toolkit Release Notes)")


@NOTE.claim("TMA descriptors in one dimension have a bug in CUDA.", "ch10_tile_pipeline", "The rules of a map")
def one_dimension(evidence):
    try:
        tensor_map.check_describable((65536,), (1,), 4, 4096, (1024,))
        outcome = "a box of 1,024 is taken"
    except ValueError as error:
        outcome = f"a box of 1,024: \"{str(error).rstrip('.')}\""
    return Finding(UNTESTED, outcome, "its source is not in the note")


@NOTE.claim("TMA pipelines in two dimensions have one.", "ch10_tile_pipeline", "Check before timing")
def two_dimensions(evidence):
    right, cases = (sum(row["cases"] for row in evidence("ch10_tile_check", **wanted))
                    for wanted in ({"status": "ok"}, {}))
    return Finding(UNTESTED, f"on an H200 {right} of {cases} cases are right",
                   "its source is not in the note, and no GB10 was there")
