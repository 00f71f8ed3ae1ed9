"""The command of `ch14.fp4_decode`: check and time configurations beside cuBLAS, or compile them."""

from ch14 import fp4_decode
from ch14.fp4_decode.configs import MAX_TOKENS
from ch14.fp4_decode.lesson import experiments
from ch14.fp4_decode.lesson.verification import verify_decode
from tilelab import cli
from tilelab.runtime import device, provenance


def _refuse(m: int, n: int, k: int) -> str:
    return f"M at most {MAX_TOKENS} and K a multiple of 32" if m > MAX_TOKENS or k % fp4_decode.BLOCK else ""


def _find_configs(options: cli.Options) -> dict:
    named, here = fp4_decode.configs(options.mnk[0]), device.current()
    return {"best": fp4_decode.best_config(*options.mnk, here), **named} if here.has_tma else named


COMMAND = cli.Command(
    module="ch14.fp4_decode",
    description="Check and time bf16 tokens times MXFP4 weights against cuBLAS with bf16 weights; with --target only "
    "compile it.",
    options={
        "mnk": cli.sizes("M,N,K", (16, 8192, 8192), "M tokens, weights (N, K)", largest=2**24, rule=_refuse),
        "config": cli.configs(_find_configs, "best", "a name of ch14.fp4_decode.configs(M), best or all"),
        "target": cli.target("compile only, for this target (sm_90a); needs no GPU"),
    },
    columns="name config status ms peer_ms gbps ratio error registers spills smem reason",
    source=lambda: provenance.source_hash(*experiments.DECODE_SOURCES),
    needs=("has_tma", "timing the decode kernels", "compile them with --target sm_90a"),
    verify=lambda options, config: verify_decode(*options.mnk, config),
    compare=lambda options, right: experiments.compare(options.mnk, right),
    job=lambda options, config: fp4_decode.job(config, options.target, options.mnk[0]),
)
