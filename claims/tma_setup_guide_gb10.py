"""Claims of the field note "TMA Setup Guide for Grace-Blackwell GB10"."""

from __future__ import annotations

import functools

from ch14 import compiled
from ch14.descriptors import experiments
from claims.judge import Finding, Note, decide, holds, only_if, refuted, span, untested
from tilelab import device, doctor, tensor_map

NOTE = Note("TMA Setup Guide for Grace-Blackwell GB10")
GB10, H200 = device.KNOWN["GB10"], device.KNOWN["H200"]


@NOTE.claim("GB10's memory is HBM3e with 1.5 TB/s.", "00_start", "Ask for capabilities, not for names")
def memory(of) -> Finding:
    return decide(GB10.memory == "HBM3e" and GB10.peak_gbps >= 1500,
                  f"{GB10.memory}, {GB10.peak_gbps} GB/s ({GB10.source})")


@NOTE.claim("A GB10 moves 900 to 1,350 GB/s.", "ch14_descriptors", "The note's GPU and its variables")
def rates(of) -> Finding:
    times = span((900 / GB10.peak_gbps, 1350 / GB10.peak_gbps), ".1f")
    return decide(GB10.peak_gbps >= 900, f"{times} × what its memory can do: no measurement")


def shares(of, tma: bool) -> list[float]:
    """What copy and a x + y reach of the datasheet's bandwidth, at best, in percent."""
    rows = of("ch07_bulk_speed")
    return [100 / H200.peak_gbps * max(row["gbps"] for row in rows if row["op"] == op
                                       and row["name"].startswith("bulk") == tma) for op in ("copy", "axpy")]


@NOTE.claim("With TMA 85 to 90 % of the memory's peak is reached.", "ch07_bulk_copy", "The floor, and the figures")
def with_tma(of) -> Finding:
    found, fronts = shares(of, tma=True), [row["ratio"] for row in of("ch07_bulk_fronts") if row["op"] == "copy"]
    figure = f"{span(found, '.0f')} % of an H200's; {span(fronts)} × torch's copy by the order of chunks"
    if min(found) < 85:
        return refuted(figure)
    return only_if("chunks come in order", figure) if min(fronts) < 0.95 else holds(figure)


@NOTE.claim("Without TMA it is 60 to 70 %.", "ch07_bulk_copy", "The floor, and the figures")
def without_tma(of) -> Finding:
    found = shares(of, tma=False)
    return decide(max(found) <= 75, f"{span(found, '.0f')} % of an H200's, by 16-byte loads")


def product(of, mode: str) -> float:
    """Speed of a 4096 cubed product in a mode of torch.compile, over eager."""
    return next(row["ratio"] for row in of("ch14_compiled_cells") if (row["workload"], row["name"]) == ("matmul", mode))


@NOTE.claim("`torch.compile` makes a product 1.5 times as fast as eager.", "ch14_compiled", "Measure")
def compile_gain(of) -> Finding:
    return decide(product(of, "default") >= 1.5, f"{product(of, 'default'):.2f} × at 4096³")


@NOTE.claim("`max-autotune` makes it twice as fast, or more.", "ch14_compiled", "Measure")
def autotune_gain(of) -> Finding:
    return decide(product(of, "max-autotune") >= 2, f"{product(of, 'max-autotune'):.2f} × at 4096³, "
                  f"{product(of, 'max-autotune-no-cudagraphs'):.2f} without its CUDA graph")


@NOTE.claim("`max-autotune` engages TMA automatically.", "ch14_compiled", "No instruction, no claim")
def autotune_engages_tma(of) -> Finding:
    offered = sorted({row["name"] for row in of("ch14_compiled_choices") if row["whose"] == "Triton, persistent TMA"})
    eager = next(row for row in of("ch14_compiled_ncu") if (row["workload"], row["name"]) == ("matmul", "eager"))
    return decide("max-autotune" in offered, f"descriptors are tried by {' and '.join(offered)} alone; eager's cuBLAS "
                  f"executes UTMALDG {eager['UTMALDG']:,} times as it is")


@NOTE.claim("On GB10, too, `max-autotune` is the way.", "ch14_compiled", "No instruction, no claim")
def autotune_on_gb10(of) -> Finding:
    offers = compiled.offers_triton_gemm(GB10.sms)
    return decide(offers, f"with {GB10.sms} SMs torch offers {'Triton products' if offers else 'no Triton product'}")


@NOTE.claim("FlashAttention-3 with TMA is 2.0 to 2.5 times as fast as standard attention.", "ch14_attention",
            "The ladder")
def attention(of) -> Finding:
    by = {row["name"]: row["ratio"] for row in of("ch14_attention_ladder") if not row["causal"]}
    gain = by["cuDNN"] / by["eager"], by["cuDNN"] / by["flash"]
    figure = (f"cuDNN, by TMA: {gain[0]:.1f} × step by step, {gain[1]:.1f} × flash; ours, by TMA: "
              f"{by['persistent'] / by['flash']:.1f} × flash; flash, without TMA: {by['flash'] / by['eager']:.1f} × "
              "step by step (FlashAttention-3 was not measured)")
    if gain[1] >= 2:
        return holds(figure)
    return only_if("standard means step by step", figure) if gain[0] >= 2 else refuted(figure)


@NOTE.claim("Triton 3.5 crashes unless BLOCK_K is 32, with one stage and four warps.", "ch14_bug_hunt",
            "The note's rule against every build")
def conservative_settings(of) -> Finding:
    others = [row for row in of("ch14_bug_hunt_loop")
              if (row["BLOCK_K"], row["num_stages"], row["num_warps"]) != (32, 1, 4)]
    built, plain = ([row for row in others if row["outcome"] == "builds" and row["LOOP"] in loops]
                    for loops in ({row["LOOP"] for row in others}, {"plain"}))
    whole = sum(row["LOOP"] == "plain" for row in others)
    return decide(not built, f"{len(built)} of {len(others)} other builds succeed; of the plain loop, which it shows, "
                             f"{len(plain)} of {whole}")


@NOTE.claim("Triton 3.5.0 builds TMA kernels for GB10.", "ch14_bug_hunt", "Which versions, which GPUs")
def triton_for_gb10(of) -> Finding:
    rows = [row for row in of("ch14_bug_hunt_matrix") if row["target"] == "sm_121a" and row["hunt"] == "loop"]
    old, new = ([row["outcome"] for row in rows if row["triton"] == triton].count("builds") for triton in
                ("3.5.0", "3.6.0"))
    every = sum(row["triton"] == "3.5.0" for row in rows)
    figure = f"{old} of {every} builds succeed with the ptxas that 3.5.0 brings, {new} with that of 3.6.0"
    return holds(figure) if old == every else untested("another ptxas was not tried", figure)


@NOTE.claim("Its Triton kernel with `make_tensor_descriptor` runs as printed.", "ch14_descriptors",
            "What each rule is for")
def listing_runs(of) -> Finding:
    said = next(row["device"] for row in of("ch14_descriptors_rules") if row["rule"] == "an allocator is set")
    if said.startswith("right"):
        return holds("right without an allocator")
    return only_if("an allocator is set before", f"without: \"{said.split(': ', 1)[1].split(',')[0]}\"")


@functools.cache
def readers(*names: str) -> tuple[str, ...]:
    """Which of triton and torch hold one of the words, in source or library."""
    return tuple(package for package in ("triton", "torch")
                 if any(experiments.find_words(package, list(names)).values()))


def read(name: str) -> Finding:
    found = readers(name)
    return decide(bool(found), f"read by {' and '.join(found)}" if found else "in no file of Triton or torch")


@NOTE.claim("`TRITON_TMA_ENABLE=1` enables TMA in Triton.", "ch14_descriptors", "The note's GPU and its variables")
def tma_enable(of) -> Finding:
    return read("TRITON_TMA_ENABLE")


@NOTE.claim("`DISABLE_TMA=1` disables it.", "ch14_descriptors", "The note's GPU and its variables")
def tma_disable(of) -> Finding:
    return read("DISABLE_TMA")


@NOTE.claim("`TRITON_CUDNN_ALGOS=1` enables cuDNN's algorithms.", "ch14_descriptors",
            "The note's GPU and its variables")
def cudnn_algos(of) -> Finding:
    return read("TRITON_CUDNN_ALGOS")


@NOTE.claim("`nsys profile` verifies that TMA is used.", "ch14_compiled", "No instruction, no claim")
def nsys(of) -> Finding:
    rows = {row["name"]: row["UTMALDG"] for row in of("ch14_compiled_ncu") if row["workload"] == "attention"}
    return untested("nsys was not run; that command traces kernels, not instructions",
                    f"a count does tell: UTMALDG {rows['cuDNN']:,} in cuDNN's attention, {rows['flash']:,} in flash")


@NOTE.claim("A driver from 550 on suffices for CUDA 13.", "00_start", "Prove the tool chain")
def driver(of) -> Finding:
    return decide(doctor.MIN_DRIVER <= 550, f"{doctor.MIN_DRIVER} or newer (CUDA 13 Toolkit Release Notes)")


@NOTE.claim("TMA descriptors in one dimension have a bug in CUDA.", "ch10_tile_pipeline", "The rules of a map")
def one_dimension(of) -> Finding:
    try:
        tensor_map.check_describable((65536,), (1,), 4, 4096, (1024,))
        said = "a box of 1,024 is taken"
    except ValueError as error:
        said = f"a box of 1,024: \"{str(error).rstrip('.')}\""
    return untested("its source is not in the note", said)


@NOTE.claim("TMA pipelines in two dimensions have one.", "ch10_tile_pipeline", "Check before timing")
def two_dimensions(of) -> Finding:
    rows = of("ch10_tile_check")
    right = sum(row["cases"] for row in rows if row["status"] == "ok")
    return untested("its source is not in the note, and no GB10 was there",
                    f"on an H200 {right} of {sum(row['cases'] for row in rows)} cases are right")
