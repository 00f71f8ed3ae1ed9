"""The command of `ch14.attention`: check and time steps of the ladder against cuDNN, or compile them."""

from ch14.attention import configs, job
from ch14.attention.configs import HEAD_DIMS, best_config, rejection
from ch14.attention.lesson import experiments
from tilelab import cli
from tilelab.runtime import device


def _require(b: int, h: int, hk: int, s: int, d: int) -> str:
    if h % hk or s > 1 << 16 or d not in HEAD_DIMS or b * h * s > 1 << 26:
        return "H a multiple of HK, S up to 65,536, D 64 or 128, and B x H x S up to 67,108,864"
    return ""


def _make_case(options: cli.Options) -> tuple:
    b, h, hk, s, d = options.shape
    return b, h, hk, s, s, d, options.causal


def _name_steps(options: cli.Options) -> dict:
    d, target = options.shape[4], options.target or device.current().target
    return {**configs(d), "best": best_config(d, target, _make_case(options))}


def _compare(options: cli.Options, right: dict) -> list[dict]:
    prepared = {name: experiments.prepare_attention(each, options.causal) for name, each in right.items()}
    return experiments.compare_with_cudnn(prepared, _make_case(options))


COMMAND = cli.Command(
    module="ch14.attention",
    description="Check and time flash attention (forward, bf16) against cuDNN's; with --target only compile it.",
    options={
        "shape": cli.sizes(
            "B,H,HK,S,D",
            (4, 16, 16, 8192, 128),
            "batch, heads, key heads, length, head dimension",
            rule=_require,
        ),
        "causal": cli.flag("query i sees keys 0 to i"),
        "target": cli.target(),
        "step": cli.configs(_name_steps, "best", f"{', '.join(configs())}, best or all"),
    },
    columns="name config status ms tflops ratio error peer_error registers spills smem tma_load wgmma tcgen05_mma "
    "mma_sync reason",
    source=experiments.source,
    needs=("has_tma", "timing attention", "compile it with --target sm_100a"),
    reject=lambda options, config, target: rejection(config, target),
    verify=lambda options, config: experiments.verify(config, _make_case(options)),
    compare=_compare,
    job=lambda options, config: job(config, options.target, options.shape[4], options.causal),
    label=lambda options, name, config: experiments.label(_make_case(options), name, config),
)
