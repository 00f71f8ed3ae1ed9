"""The command of `ch14.fp8_gemm`: check and time configurations beside torch, tune shapes, or show an experiment."""

from ch14 import fp8_gemm
from ch14.fp8_gemm.configs import BLOCK
from ch14.fp8_gemm.lesson import experiments, impacts, isolated, profile, sweep, verification
from tilelab import cli
from tilelab.runtime import device, provenance
from tilelab.sweeps import tune

# Parts of the kernel alone, its epilogue in warps of its own, their number by the tile, and the profiler's counters.
MODES = {
    "isolated": (isolated.measure_isolated, isolated.tabulate),
    "epilogue_warps": (impacts.measure_epilogue_warps, impacts.tabulate_epilogue_warps),
    "tile_warps": (impacts.measure_tile_warps, impacts.tabulate_tile_warps),
    "profile": (profile.profile_parts, profile.tabulate),
}


def _require(m: int, n: int, k: int) -> str:
    return "N a multiple of 8 and K of 128" if n % fp8_gemm.N_MULTIPLE or k % BLOCK else ""


def _find_configs(options: cli.Options) -> dict:
    sms = device.current().sms or device.KNOWN["H200"].sms
    return {"best": fp8_gemm.find_best(*options.mnk, sms)[0], **fp8_gemm.configs()}


def _compare(options: cli.Options, right: dict) -> list[dict]:
    courses = {name: experiments.prepare_course(config) for name, config in right.items()}
    return experiments.measure({"torch": experiments.prepare_torch, **courses}, options.mnk)


def _show_mode(options: cli.Options) -> int:
    measure, tabulate = MODES[options.mode]
    try:
        print(tabulate(measure()))
    except FileNotFoundError:
        print(f"ch14_blockscaled_{options.mode} is not recorded.")
    return 0


COMMAND = cli.Command(
    module="ch14.fp8_gemm",
    description="Check and time fp8 with block scales against torch's scaled_mm; with --compile only compile it.",
    options={
        "mnk": cli.sizes("M,N,K", (4096, 4096, 7168), largest=fp8_gemm.LARGEST, rule=_require),
        "config": cli.configs(_find_configs, "best", f"{', '.join(fp8_gemm.configs())}, best or all"),
        "compile": cli.flag("compile only, for sm_90a; needs no GPU"),
        "mode": cli.choice(MODES, None, "an experiment at fixed shapes; recorded figures without a GPU"),
        "tune": cli.tune(),
    },
    complete=lambda options: setattr(options, "target", "sm_90a" if options.compile else None),
    alone={"tune": (), "mode": ()},
    actions={"tune": lambda options: tune.run(sweep.Fp8Space, options.tune), "mode": _show_mode},
    columns="name config status ms peer_ms tflops ratio error registers spills smem QGMMA reason",
    source=lambda: provenance.source_hash(*experiments.FP8_SOURCES),
    needs=("has_wgmma", "fp8_gemm", fp8_gemm.INSTEAD),
    verify=lambda options, config: verification.verify_fp8(options.mnk, config),
    compare=_compare,
    job=lambda options, config: fp8_gemm.job(config, options.target),
)
