"""The command of `ch10.wgmma_gemm`: check and time steps of the ladder against cuBLAS, or compile them."""

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.choice import predict_us
from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig
from ch10.wgmma_gemm.lesson import experiments, sweep
from tilelab import cli
from tilelab.runtime import device
from tilelab.sweeps import tune


def _verify(options: cli.Options, config: WgmmaConfig) -> dict:
    predicted_us = predict_us(config, *options.mnk, device.current().sms)
    return {"predicted_ms": predicted_us / 1e3, **experiments.verify(config, *options.mnk)}


def _complete(options: cli.Options) -> None:
    options.target = "sm_90a" if options.compile else None


COMMAND = cli.Command(
    module="ch10.wgmma_gemm",
    description="Check and time C = A B (bf16) against cuBLAS; with --compile only compile it for sm_90a.",
    options={
        "mnk": cli.sizes(
            "M,N,K",
            (4096, 4096, 4096),
            largest=wgmma_gemm.LARGEST_EXTENT,
            rule=lambda m, n, k: "N and K multiples of 8" if n % 8 or k % 8 else "",
        ),
        "step": cli.configs(
            lambda options: {"best": wgmma_gemm.resolve_config("best", *options.mnk), **STEPS},
            "best",
            f"{', '.join(STEPS)}, best or all",
        ),
        "tune": cli.tune(),
        "compile": cli.flag("compile only; needs no GPU"),
    },
    complete=_complete,
    alone={"tune": ()},
    actions={"tune": lambda options: tune.run(sweep.WgmmaSpace, options.tune)},
    columns="name config status ms predicted_ms tflops ratio error peer_error registers spills smem HGMMA reason",
    source=experiments.source,
    needs=("has_wgmma", "wgmma_gemm", wgmma_gemm.INSTEAD),
    verify=_verify,
    compare=lambda options, right: experiments.compare_with_cublas(right, *options.mnk),
    job=lambda options, config: wgmma_gemm.job(config, options.target),
)
