"""The command of `ch14.moe`: check and time a product of a model beside its peers, or compile the Triton kernel."""

from ch14.moe.configs import SETS, job, rejection
from ch14.moe.lesson import experiments, workloads
from tilelab import cli
from tilelab.records import results
from tilelab.runtime import device

MODELS = workloads.MODELS | workloads.HELD_OUT


def _complete(options: cli.Options) -> None:
    chosen_on = "tuned" if options.model in workloads.MODELS else "held out"
    values = options.model, options.part, options.tokens, options.routing
    options.case = workloads.Case(chosen_on, *values)
    if options.dtype == "fp8" and options.case.layer.product(options.part)[1] % 128:
        raise ValueError(f"fp8 needs K a multiple of 128, which this product of {options.model} has not.")


def _find_configs(options: cli.Options) -> dict:
    def cannot_run(config) -> bool:
        return bool(options.target and rejection(config, options.target, options.dtype))

    return {config.name: config for config in sorted(SETS[options.dtype, False], key=cannot_run)}


def _measure(options: cli.Options) -> list[dict] | results.Record:
    if not device.current().has_wgmma:
        found = experiments.measure_shapes.load()
        rows = [row for row in found.rows if row["model"] == options.model]
        return cli.show_recorded(options, found, rows, "compile it with --target sm_90a")
    return experiments.measure_case(options.case, options.dtype == "fp8")


COMMAND = cli.Command(
    module="ch14.moe",
    description="Check and time a product of a model's experts beside DeepGEMM and torch; without a Hopper GPU, show "
    "what is recorded of this model; with --target only compile the Triton kernel.",
    options={
        "model": cli.choice(MODELS, "Qwen 3 30B", "whose sizes are taken"),
        "part": cli.choice(("up", "down"), "up", "the first product, of gates and values, or the second"),
        "tokens": cli.number(4096, range(1, 65537), "a whole number from 1 to 65,536"),
        "routing": cli.choice(workloads.ROUTINGS, "random", "how the tokens choose their experts"),
        "dtype": cli.choice(("bf16", "fp8"), "bf16"),
        "config": cli.configs(_find_configs, "all", "with --target: a name of ch14.moe.configs()"),
        "target": cli.target(),
    },
    alone={"config": ("target", "dtype", "json")},
    complete=_complete,
    columns="name model part tokens routing dtype kernel status ms peer peer_ms ratio tflops gbps error registers "
    "spills smem reason",
    source=experiments.measure_shapes.source,
    measure=_measure,
    reject=lambda options, config, target: rejection(config, target, options.dtype),
    job=lambda options, config: job(config, options.target, options.dtype),
)
