"""The measurements behind the notebook `05_ch10_wgmma_gemm`.

Each experiment returns a results.Record: measured now on a GPU with wgmma, else the recorded one.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterable

import torch

from ch10 import wgmma_gemm
from ch10.wgmma_gemm import choice
from ch10.wgmma_gemm.choice import predict_us
from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig, fits, rejection
from tilelab.measure import bench, check, layer_shapes, peers
from tilelab.measure.patch import patched_source
from tilelab.records import results
from tilelab.runtime import build, device, operands, provenance, tensor_map

SQUARES = (2048, 4096, 8192)
# Ragged and thin shapes, which no tile divides.
RAGGED = ((1, 8, 8), (1, 4096, 4096), (17, 1032, 520), (33, 264, 8), (65, 4104, 1000), (129, 520, 72))
RAGGED += ((333, 520, 136), (1000, 1000, 1000), (4097, 4104, 4112), (8192, 8, 4096), (300, 6152, 14344))
QUICK = {"rounds": 6, "warm_s": 0, "burst_ms": 2}
LAYER_TIMING = {"rounds": 8, "warm_s": 0.02, "burst_ms": 1.5}
BURST = 40


def source(*more) -> str:
    """Return the hash of the code that is measured."""
    files = map(wgmma_gemm.SOURCE.with_name, ("configs.py", "choice.py"))
    return provenance.source_hash(wgmma_gemm, *files, tensor_map, wgmma_gemm.SOURCE, *more)


def has_wgmma() -> bool:
    return device.current().has_wgmma


experiment = functools.partial(results.experiment, source=source, can_run=has_wgmma)


def make_inputs(m: int, n: int, k: int) -> tuple:
    """Return random normal a (m, k) and b (k, n), and an empty out (m, n), in bf16 on the GPU."""
    a, weight = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    return a, weight.T, torch.empty(m, n, device="cuda", dtype=torch.bfloat16)


def prepare_cublas(a, b, out):
    """Return a function that multiplies with cuBLAS, through torch."""
    return lambda: torch.mm(a, b, out=out)


def verify(config: WgmmaConfig, m: int, n: int, k: int, prepare=wgmma_gemm.prepare) -> dict:
    """Return a row of tilelab.measure.check: the error against float64. It may be 1.5 times cuBLAS's own."""
    a, b, _ = make_inputs(m, n, k)
    return check.compare(
        lambda a, b, out: prepare(a, b, out=out, config=config)(),
        wgmma_gemm.spec,
        [(str(config), (a, b))],
        out=lambda a, b: ((m, n), torch.bfloat16),
        peer=torch.mm,
    )[0]


def compare_with_cublas(configs: dict[str, WgmmaConfig], m: int, n: int, k: int, **timing) -> list[dict]:
    """Return rows of bench.Timing, one per configuration. All configurations and cuBLAS run interleaved."""
    ours = {
        name: lambda a, b, out, config=config: wgmma_gemm.prepare(a, b, out=out, config=config)
        for name, config in configs.items()
    }
    ours = {"cuBLAS": prepare_cublas, **ours}
    found = bench.compare(ours, lambda: make_inputs(m, n, k), "cuBLAS", flops=2 * m * n * k, **timing)
    return [{"config": str(each), "shape": [m, n, k], **found[name].row()} for name, each in configs.items()]


def measure_best(m: int, n: int, k: int, **timing) -> dict:
    """Check and time the configuration that "best" stands for at a shape; the row holds the predicted time, too."""
    config, chosen = wgmma_gemm.find_best(m, n, k)
    predicted_ms = predict_us(config, m, n, k, device.current().sms) / 1e3
    row = {"predicted_ms": predicted_ms, "chosen": chosen, **verify(config, m, n, k)}
    row |= {"name": "best", "config": str(config), "shape": [m, n, k]}
    return row | compare_with_cublas({"best": config}, m, n, k, **timing)[0] if row["status"] == "ok" else row


def configs_for(shape: tuple[int, int, int]) -> dict[str, WgmmaConfig]:
    """Return the steps of the ladder, and the configuration of each family at a shape, that can run there."""
    found = {str(config): config for config in choice.candidates(*shape).values()}
    return {name: config for name, config in {**STEPS, **found}.items() if fits(config, shape[2])}


def one_of_each_kind() -> dict[str, WgmmaConfig]:
    """Return the ladder, and one configuration of each other kind of kernel code."""
    kept = dict(STEPS)
    kinds = {_kind(config) for config in kept.values()}
    for shape in RAGGED:
        for name, config in configs_for(shape).items():
            if _kind(config) not in kinds:
                kept[name] = config
                kinds.add(_kind(config))
    return kept


def _kind(config: WgmmaConfig) -> tuple:
    clusters = config.cluster > 1, config.cluster_n > 1, config.block_n % (8 * config.cluster) > 0
    return config.kernel, config.consumers, *clusters, config.swap, config.boxes_per_stage


def _compile(configs: dict[str, WgmmaConfig]) -> None:
    build.compile_ahead(map(wgmma_gemm.job, configs.values()))


# ---- correctness


@experiment("ch10_gemm_check")
def check_correctness():
    """Check each step, and each configuration that a shape may get, at sizes that no tile divides."""
    _compile({name: config for shape in RAGGED for name, config in configs_for(shape).items()})
    return [
        {**verify(config, *shape), "name": name, "shape": list(shape)}
        for shape in RAGGED
        for name, config in configs_for(shape).items()
    ]


def sanitizer_cases(share: int = 0, shares: int = 1) -> None:
    """Run every `shares`-th kernel on small and ragged shapes under a sanitizer; AssertionError for a wrong result."""
    for config in [*one_of_each_kind().values()][share::shares]:
        for shape in ((130, 264, 392), (300, 136, 1032)):
            check.require_right({f"{config} {shape}": verify(config, *shape)})


@results.experiment("ch10_gemm_sanitizer", source, can_run=lambda: has_wgmma() and check.can_sanitize())
def run_sanitizers():
    """Run each tool of compute-sanitizer on `sanitizer_cases`."""
    _compile(one_of_each_kind())  # each tool would compile them one after the other
    return check.sanitize("ch10.wgmma_gemm.lesson.experiments", shares=6)


# ---- speed


@experiment("ch10_gemm_squares")
def measure_squares():
    """Time the best configuration against cuBLAS at 2048, 4096 and 8192 cubed: interleaved, then in bursts."""
    rows = []
    for side in SQUARES:
        rows.append({**measure_best(side, side, side), "how": "interleaved"})
        rows.append({**measure_bursts(side, side, side), "how": f"bursts of {BURST}"})
    return rows


def measure_bursts(m: int, n: int, k: int, rounds: int = 12, rest_s: float = 0.05) -> dict:
    """Return the medians of `rounds` bursts of 40 launches, ours and cuBLAS in turn, each after a rest that cools the
    chip."""
    sets = [make_inputs(m, n, k) for _ in range(4)]
    launches = {
        "peer_ms": [prepare_cublas(*each) for each in sets],
        "ms": [wgmma_gemm.prepare(a, b, out=out) for a, b, out in sets],
    }
    times = {name: [] for name in launches}
    for round_number in range(rounds + 1):
        for name in list(launches)[:: 1 if round_number % 2 else -1]:
            torch.cuda.synchronize()
            time.sleep(rest_s)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for call in range(BURST):
                launches[name][call % len(sets)]()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / BURST)
    # the first round warms up
    found = {name: statistics.median(values[1:]) for name, values in times.items()}
    speeds = {"ratio": found["peer_ms"] / found["ms"], "tflops": 2 * m * n * k / found["ms"] / 1e9}
    row = {"name": "best", "shape": [m, n, k], **found, "peer": "cuBLAS", **speeds}
    return row | {"status": "ok", "reason": "", "config": str(wgmma_gemm.find_best(m, n, k)[0])}


@experiment("ch10_gemm_peers", source=lambda: source(peers.DeepGemm, peers.Quack))
def measure_peers():
    """Check the best configuration and time it beside cuBLAS, quack and DeepGEMM, all interleaved, at SQUARES.

    Rows are those of tilelab.measure.peers.compare: one per peer.
    """
    quack, deep_gemm = peers.find("quack"), peers.find("deep_gemm")
    rivals = {
        peers.Peer("cuBLAS", provenance.versions()["cublas"]): prepare_cublas,
        quack: quack.prepare_gemm,
        deep_gemm: deep_gemm.prepare_gemm,
    }
    configs = {side: wgmma_gemm.find_best(side, side, side)[0] for side in SQUARES}
    _compile({str(config): config for config in configs.values()})
    rows = []
    for side, config in configs.items():
        found = peers.compare(
            lambda a, b, out, config=config: wgmma_gemm.prepare(a, b, out=out, config=config),
            rivals,
            functools.partial(make_inputs, side, side, side),
            functools.partial(find_fault, side),
            verify(config, side, side, side),
            flops=2 * side**3,
        )
        rows += [row | {"config": str(config), "shape": [side] * 3} for row in found]
    return rows


def find_fault(side: int, prepare) -> str:
    """Return what is wrong with the product of a candidate of bench.compare at `side` cubed, or ""."""
    a, b, _ = make_inputs(side, side, side)
    return check.compare(
        lambda a, b, out: prepare(a, b, out)(),
        wgmma_gemm.spec,
        [("peer", (a, b))],
        out=lambda a, b: ((side, side), torch.bfloat16),
    )[0]["reason"]


def _measure_products(products: Iterable[tuple[str, tuple[int, int, int]]], **timing) -> list[dict]:
    """Time "best" beside cuBLAS, interleaved, for (name, shape) of matrix products.

    `late_ratio` is of the same kernel without early launch, and `again` the ratio of cuBLAS to itself.
    """

    def prepare(config):
        return lambda a, b, out: wgmma_gemm.prepare(a, b, out=out, config=config)

    found = [(name, shape, *wgmma_gemm.find_best(*shape)) for name, shape in products]
    late = {config: dataclasses.replace(config, pdl=False) for *_, config, _ in found}
    _compile({str(config): config for config in late})
    rows = []
    for name, (m, n, k), config, chosen in found:
        timed = bench.compare(
            {
                "cuBLAS": prepare_cublas,
                "best": prepare(config),
                "late": prepare(late[config]),
                "again": prepare_cublas,
            },
            lambda: make_inputs(m, n, k),  # noqa: B023, it is called before the next shape
            "cuBLAS",
            flops=2 * m * n * k,
            **timing,
        )
        labels = {"name": name, "shape": [m, n, k], "config": str(config), "chosen": chosen}
        labels |= {"late_ratio": timed["late"].ratio, "again": timed["again"].ratio}
        rows.append(timed["best"].row() | labels)
    return rows


@experiment("ch10_gemm_layers", source=lambda: source(layer_shapes))
def measure_layers():
    """Time the layers of six models, whose times the choice knows."""
    return _measure_products(layer_shapes.list_products(), **LAYER_TIMING)


@experiment("ch10_gemm_held_out", source=lambda: source(layer_shapes))
def measure_held_out():
    """Time layers of models that no table holds, at numbers of tokens that no table holds."""
    return _measure_products(layer_shapes.list_held_out(), warm_s=0.05, burst_ms=2)


def _most_stages(columns: int) -> WgmmaConfig:
    """Return the persistent tile of 128 x `columns` with as many stages as fit, at least four. If need be, C is staged
    in subtiles."""
    fields = {"consumers": 2, "persistent": True, "pdl": True, "group_m": 16}
    tiles = (
        WgmmaConfig("specialised", 128, columns, stages, epilogue_subtile=subtiles, **fields)
        for stages, subtiles in ((6, 1), (5, 1), (4, 1), (4, 4), (4, 7))
        if columns % (16 * subtiles) == 0
    )
    return next(tile for tile in tiles if not rejection(tile))


@experiment("ch10_gemm_width")
def measure_width():
    """Time tiles of 128 x 128 to 128 x 256 at three sizes, beside the share of the SMs' waves that they fill."""
    rows, sms = [], device.current().sms
    configs = {str(columns): _most_stages(columns) for columns in (128, 160, 192, 208, 224, 256)}
    for side in SQUARES:
        for row in compare_with_cublas(configs, side, side, side, rounds=10):
            config = configs[row["name"]]
            tiles = config.tiles(side, side)
            waves = -(-tiles // sms)
            useful = side * side / (waves * sms * 128 * config.block_n)
            rows.append({**row, "columns": config.block_n, "tiles": tiles, "waves": waves, "useful": useful})
    return rows


# ---- faults, planted in a patched kernel

BROKEN_CONFIG = WgmmaConfig("specialised", 128, 128, 4, consumers=2, persistent=True)
RUNS = 10


def fault_patches() -> dict[str, list[tuple[str, str, int]]]:
    """Return the replacements that plant each fault in wgmma_gemm.cu; "nothing" is the control."""
    return {
        "nothing": [],
        "phase": [("state.phase ^ 1);", "1);", 1), ("state.phase);", "0);", 2)],  # the parity never flips
        "proxy_fence": [("fence_proxy_async();", "", 1)],
        # The phase completes when all but 8 KiB have landed.
        "expect_less": [
            (
                "mbarrier_arrive_expect_tx(barrier, STAGE_BYTES)",
                "mbarrier_arrive_expect_tx(barrier, STAGE_BYTES - 8192)",
                2,
            )
        ],
        # A stage is released when its products are issued, not when they have finished.
        "release_early": [
            ("        wgmma_wait<1>();\n", "", 1),
            (
                "        if (step > first) {\n            release<MULTICAST>(barriers.empty + 8 * previous_stage);",
                "        {\n            release<MULTICAST>(barriers.empty + 8 * state.stage);",
                1,
            ),
            (
                "    wgmma_wait<0>();\n    release<MULTICAST>(barriers.empty + 8 * previous_stage);",
                "    wgmma_wait<0>();",
                1,
            ),
        ],
    }


def try_fault(fault: str) -> dict:
    """Return {status, reason} of RUNS checks of the kernel with this fault. The process may fault or hang."""
    with patched_source(wgmma_gemm.SOURCE, *fault_patches()[fault]) as patched:

        def prepare(a, b, *, out, config):
            return operands.Launch(wgmma_gemm.build_launch(a, b, out, config, patched), out, config)

        a, b, out = make_inputs(1024, 1024, 2048)
        prepare(a, b, out=out, config=BROKEN_CONFIG)  # compile
        verify(STEPS["tile"], 256, 256, 256)
        print("begun", flush=True)  # the GPU is open and the kernel is compiled: the time limit starts here
        rows = [verify(BROKEN_CONFIG, 1024, 1024, 2048, prepare) for _ in range(RUNS)]
    wrong = [row["reason"] for row in rows if row["status"] != "ok"]
    if wrong:
        return {"status": "wrong", "reason": f"wrong in {len(wrong)} of {RUNS} runs: {wrong[-1]}"}
    return {"status": "ok", "reason": f"right in all {RUNS} runs"}


def run_fault(fault: str, limit_s: float = 10) -> dict:
    """Return what `try_fault` returns in a process of its own, or how that process ended."""
    return check.try_rows(
        "import json; from ch10.wgmma_gemm.lesson import experiments; "
        f"print(json.dumps(experiments.try_fault({fault!r})))",
        limit_s,
    )


@experiment("ch10_gemm_broken", source=lambda: source(fault_patches))
def run_broken_kernels():
    """Run the kernel with each fault, all at once, because some hang."""
    _compile({"tile": STEPS["tile"]})
    faults = fault_patches()
    found = check.run_side_by_side(*(functools.partial(run_fault, fault) for fault in faults))
    kernels = [str(BROKEN_CONFIG) + (f", without {fault}" if fault != "nothing" else "") for fault in faults]
    return [{"name": fault, "kernel": kernel, **row} for fault, kernel, row in zip(faults, kernels, found)]
