"""What the compiler makes of the attention kernels, and that a launch finds what was built for it."""

import json

import pretended
import pytest
from builds import build_in_order

from ch14.attention import AttentionConfig, configs, few_queries, job
from ch14.attention.configs import best_config
from ch14.attention.lesson.command import COMMAND
from tilelab.runtime import build

pytestmark = pytest.mark.compile
TARGETS = {"sm_90a": "wgmma", "sm_100a": "tcgen05_mma", "sm_120a": "mma_sync"}  # one of each family


@pytest.fixture(scope="module")
def rows():
    """The rows of the steps on Hopper and of the best configuration elsewhere, at head dimension 128.

    The plain step and the one with overlapping products are built below with a mask.
    """
    steps = {name: config for name, config in configs(128).items() if name not in ("plain", "overlap")}
    jobs = [job(config, "sm_90a") for config in steps.values()]
    jobs += [job(best_config(128, target), target) for target in ("sm_100a", "sm_120a")]
    return [report.row() | {"config": report.job.name} for report in build_in_order(jobs)]


def test_every_target_gets_tma_and_its_tensor_core(rows):
    assert [row["target"] for row in rows] == ["sm_90a"] * 3 + ["sm_100a", "sm_120a"]
    for row in rows:
        # Triton 3.6 spills 8 bytes on sm_120a, 3.7 none
        assert row["status"] == "ok" and row["spills"] <= 16, row
        assert row["tma_load"] > 0 and row["tma_store"] > 0 and row[TARGETS[row["target"]]] > 0
        assert (row["setmaxnreg"] > 0) == ("hopper" in row["config"])


def test_the_masked_kernels_load_and_multiply_in_sass():
    """The masked kernels of both head dimensions are built nowhere else."""
    jobs = [job(configs(d)[name], "sm_90a", d, True) for d, name in ((64, "plain"), (128, "overlap"))]
    for report in build.disassemble(jobs):
        assert report.launchable and report.spills == 0
        assert all(opcode in report.sass for opcode in ("UTMALDG.4D", "UTMASTG.4D", "HGMMA"))
        assert ("USETMAXREG" in report.sass) == ("hopper" in report.job.name)
    assert not build.ptxas_remarks(report.ptx, "sm_90a")  # "wgmma serialized" would be one


def test_command_line_compiles(capsys, rows):
    assert COMMAND.main(["--target", "sm_100a", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["status"] == "ok" and row["tcgen05_mma"] > 0


LAUNCHED = """
import torch
import pretended
from ch14 import attention
from ch14.attention.lesson import experiments
from tilelab.runtime import device

jobs = []


def launch(config, case, dtype=torch.bfloat16):
    b, h, hk, s, t, d, causal = case
    q, k, v = (torch.empty(b, heads, length, d, dtype=dtype) for heads, length in ((h, s), (hk, t), (hk, t)))
    try:
        attention.prepare(q, k, v, is_causal=causal, config=config)
    except device.Unsupported as error:  # it wants to load the binary
        assert "NoneType" in str(error), error
    return {"status": "not checked"}


pretended.begin()
device.current = lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a", 132)
attention._check_operands = lambda *_: None  # tensors are on the CPU
experiments.verify, experiments.compare_with_cudnn = launch, lambda *_, **__: [{"name": "cuDNN"}]
experiments.build.compile_ahead = jobs.extend
for experiment in (experiments.check_correctness, experiments.measure_ladder.__wrapped__):
    jobs.clear()
    launched = pretended.list_launch_lookups(experiment)
    built = pretended.list_build_lookups(jobs)
    assert launched and launched <= built, (experiment, len(launched), len(built), len(launched & built))
    assert experiment is not experiments.check_correctness or launched == built
"""


def test_a_launch_finds_what_was_built_for_it():
    """The compiler's cache is looked up by hashes of the options and of the source, which names each argument as a
    launch sees it."""
    pretended.run(LAUNCHED)


SPLIT = """
import contextlib
import torch
import pretended
from ch14 import attention
from ch14.attention import AttentionConfig, few_queries
from tilelab.runtime import device, triton_launch


def launch(config, case):
    b, h, hk, s, t, d, causal = case
    q, k, v = (torch.empty(b, heads, length, d).bfloat16() for heads, length in ((h, s), (hk, t), (hk, t)))
    few_queries.prepare(q, k, v, torch.empty_like(q), causal, None, config)


def prepare(*given, **options):
    with contextlib.suppress(AttributeError):  # it wants to load the binary
        return real_prepare(*given, **options)


pretended.begin()
real_prepare, triton_launch.prepare = triton_launch.prepare, prepare
cases = {1: (1, 8, 2, 3, 100, 128, False), 7: (2, 8, 2, 1, 1, 64, True), 9: (1, 8, 2, 16, 70, 64, False)}
for tile in ((16, 64, 4, 3, "split"), (128, 128, 8, 2, "split_hopper")):
    for splits, case in cases.items():
        config, rest = AttentionConfig(*tile, splits=splits), ("sm_90a", case[5])
        jobs = [attention.job(config, *rest, case[6])]
        jobs += [few_queries.merge_job(config, *rest)] * (splits > 1)
        launched = pretended.list_launch_lookups(launch, config, case)
        assert launched == pretended.list_build_lookups(jobs) and len(launched) == len(jobs), (config, case)
"""


def test_a_launch_of_split_keys_finds_what_was_built_for_it():
    pretended.run(SPLIT)


def test_split_kernels_let_the_merge_start_early():
    hopper = AttentionConfig(128, 128, 8, 2, "split_hopper", splits=8)
    plain = AttentionConfig(16, 64, 4, 3, "split", splits=8)
    jobs = [job(hopper, "sm_90a"), job(plain, "sm_120a", 64)]
    for report in build.disassemble([*jobs, few_queries.merge_job(hopper, "sm_90a")]):
        assert report.launchable and report.spills <= 16
        merges = "merge" in report.job.name
        assert ("griddepcontrol.wait" if merges else "griddepcontrol.launch_dependents") in report.ptx
        assert ("UTMALDG.4D" in report.sass) == (not merges)
        assert ("HGMMA" in report.sass) == (report.job.kernel == jobs[0].kernel)
