"""The resource model of the GEMM's configurations against the compiler, and a build against what a launch asks for."""

import json

import pytest

from ch14.gemm.configs import SMEM_SLACK, GemmConfig, configs, job, parse, rejection
from ch14.gemm.lesson import command
from ch14.gemm.lesson.sweep import GemmSpace, tuned_configs
from tilelab.records import results
from tilelab.runtime import build
from tilelab.sweeps.sweep import Sweep

pytestmark = pytest.mark.compile
UNITS = {"wgmma": "wgmma", "tcgen05_mma": "tcgen05", "mma_sync": "mma.sync"}
# One target of each family, and each, or each fourth, configuration of a set. float8 halves the bytes of a tile, which
# the model counts alike on all of them.
HOPPER = [
    ("sm_90a", "bf16", "conservative", 1),
    ("sm_90a", "bf16", "proposed", 1),
    ("sm_90a", "bf16", "course", 4),
]
BUILT = [*HOPPER, ("sm_100a", "bf16", "proposed", 1), ("sm_120a", "fp8", "course", 4)]
OTHERS = [("sm_90a", "fp8", "proposed", 1), ("sm_90a", "bf16", "course", 1), ("sm_100a", "bf16", "course", 1)]
OTHERS += [("sm_120a", "bf16", None, 1), ("sm_120a", "fp8", "course", 1)]


def list_configs(built):
    return [
        (target, dtype, config)
        for target, dtype, which, step in built
        for config in [*configs(which, dtype).values()][::step]
    ]


def build_for(built):
    """{(target, dtype, configuration): report} of 4096 cubed, all built in one call."""
    jobs = {
        (target, dtype, config): GemmSpace((4096, 4096, 4096), dtype, compile_for=target).job(config)
        for target, dtype, config in list_configs(built)
    }
    by_job = {id(report.job): report for report in build.build(jobs.values())}
    return {key: by_job[id(job)] for key, job in jobs.items()}


@pytest.fixture(scope="module")
def reports():
    return build_for(BUILT)


@pytest.mark.trouble
def test_resource_model_agrees_with_the_compiler_on_other_targets():
    test_resource_model_agrees_with_the_compiler(build_for(OTHERS))


def test_resource_model_agrees_with_the_compiler(reports):
    for (target, dtype, config), report in reports.items():
        what = f"{config.name} {dtype} {target}: {report.reason}"
        reason = rejection(config, target, dtype)
        if config.programs_per_sm == 1 or not reason:  # two to an SM may not fit where one does
            assert (report.status == "ok") == (reason == ""), what
        if report.smem is not None:
            assert 0 <= report.smem - config.smem_bytes(dtype, target) <= SMEM_SLACK, what
            found = {unit for name, unit in UNITS.items() if report.counts[name]}
            assert found == {config.tensor_core(target)}, what


def test_the_largest_tiles_of_two_accumulators_do_not_spill():
    large = {
        (config.block_m, config.block_n): config
        for config in tuned_configs()
        if config.columns[1] and config.block_m * config.block_n >= 128 * 320
    }
    assert {(256, 160), (256, 192), (128, 320)} == set(large)
    for report in build.build(job(config, "sm_90a") for config in large.values()):
        assert report.launchable and report.spills == 0, (report.job.name, report.reason)


def test_the_compiler_refuses_four_of_the_six_proposed(reports):
    found = [reports["sm_90a", "bf16", config] for config in configs("proposed").values()]
    assert [report.status for report in found] == ["failed", "rejected", "rejected", "rejected", "ok", "ok"]
    assert "Insufficient registers" in found[0].reason
    assert [report.smem for report in found[1:4]] == [393248, 393248, 262176]


def test_a_sweep_of_all_sets_gives_each_configuration_a_row_and_a_reason(reports):
    chosen = [config for *_, config in list_configs(HOPPER)]
    rows = Sweep(chosen, GemmSpace((4096, 4096, 4096), compile_for="sm_90a")).finish()
    assert sorted(row["kernel"] for row in rows) == sorted(config.name for config in chosen)
    rejected = [row for row in rows if row["status"] == "rejected"]
    assert len(rejected) == 4 and all(row["reason"] and "registers" not in row for row in rejected)


def run(capsys, *arguments):
    status = command.COMMAND.main(list(arguments))
    return status, capsys.readouterr().out


def test_command_line_compiles_for_another_gpu(capsys, tmp_path, reports):
    status, out = run(capsys, "--target", "sm_100a", "--config", "proposed", "--json", "-")
    record = json.loads(out)
    assert status == 0 and [row["status"] for row in record["rows"]].count("rejected") == 4
    assert set(results.KEYS) <= set(record)
    status, out = run(
        capsys, "--target", "sm_90a", "--config", "128,256,64,8,4", "--json", str(tmp_path / "x.json")
    )
    assert status == 0 and "229,408 B of shared memory" in out
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 1


def test_a_sweep_is_kept_and_resumed(capsys, tmp_path, monkeypatch, reports):
    monkeypatch.setattr(command, "grid", lambda dtype: [*configs("proposed", dtype).values()])
    arguments = ["--sweep", "--target", "sm_90a", "--journal", str(tmp_path / "rows.jsonl")]
    status, out = run(capsys, *arguments)
    assert status == 0 and len(out.splitlines()) == 7
    assert "2 ok" in out.splitlines()[-1] and "4 rejected" in out.splitlines()[-1]
    status, out = run(capsys, *arguments)
    assert status == 0 and "2 of them kept from before" in out.splitlines()[-1]


def test_a_build_at_odd_sizes_compiles():
    """Triton makes other kernels of sizes that are one, or no multiple of 16, and of scaled inputs."""
    persistent, plain = parse("128,128,64,4,6"), GemmConfig(64, 64, 32, 4, 1)
    jobs = [
        GemmSpace((1, 4096, 4096)).job(persistent),
        GemmSpace((4096, 1000, 4096), layout="n").job(plain),
        GemmSpace((2048, 2048, 2048), "fp8").job(next(iter(configs("course", "fp8").values()))),
    ]
    assert all(report.launchable for report in build.build(jobs))
