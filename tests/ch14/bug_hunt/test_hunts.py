"""The engine of the bug hunt: what it reads in a compiler's words, how it bisects, and hunts live and recorded."""

import itertools
import math

import pytest
import triton
from cases import cases

from ch14.bug_hunt import HUNTS, Builds, bisect, describe, environments, find, grid, symptom
from ch14.bug_hunt.lesson import experiments
from ch14.bug_hunt.outcomes import failure, locate_failing_pass
from tilelab.runtime import build, worker_pool
from tilelab.runtime.device import Unsupported

LOOP = HUNTS["loop"]
PASS = (
    """RuntimeError: PassManager::run failed
k.py:24:23: error: 'tt.descriptor_load' op pipeliner doesn't know how to predicate this op.
LLVM ERROR: Fatal pipeliner error
      pipeline: "builtin.module(triton-licm, tritongpu-assign-latencies{num-stages=4}, canonicalize{  a=1 b=2}, """
    """tritongpu-pipeline{dump-intermediate-steps=false num-stages=4}, canonicalize{  a=1 b=2})",
k.py:16:0: error: Failures have been detected while processing an MLIR pass pipeline
k.py:16:0: note: Pipeline failed while executing [`TritonGPUPipeline` on 'builtin.module' operation]: reproducer"""
)
SILENT = """RuntimeError: PassManager::run failed
k.py:1:0: error: Failures have been detected while processing an MLIR pass pipeline
k.py:1:0: note: Pipeline failed while executing [`TritonGPUAssignLatencies` on 'builtin.module' operation]: x"""
ASSERTED = """RuntimeError: PassManager::run failed
python: /project/WSLowerToken.cpp:73: void mlir::commit(OpBuilder &): Assertion `false' failed.
k.py:1:0: note: Pipeline failed while executing [`NVGPUWarpSpecialization` on 'builtin.module' operation]: x"""
PTXAS = """PTXASError: PTXAS error: Internal Triton PTX codegen error
`ptxas` stderr:
ptxas fatal   : Value 'sm_103a' is not defined for option 'gpu-name'

Repro command: /tmp/ptxas a.ptx"""


LINE_23 = "PTXASError: PTXAS error\nptxas /tmp/a.ptx, line 23; error   : "
DIED, SILENCE = (
    "the compiler died (SIGABRT): LLVM ERROR: Cannot select: x",
    "the compiler gave no answer within 60 s",
)
PREDICATE = "'tt.descriptor_load' op pipeliner doesn't know how to predicate this op; LLVM ERROR: Fatal pipeliner error"
UNDEFINED = "CompilationError: at 3:4:\n    x = y\n        ^\nNameError('y is not defined')"


@cases(
    "said, stage, message, exception",
    (PASS, "TritonGPUPipeline", PREDICATE, "RuntimeError"),
    (SILENT, "TritonGPUAssignLatencies", "without a message", "RuntimeError"),
    (ASSERTED, "NVGPUWarpSpecialization", "Assertion `false'", "RuntimeError"),
    (PTXAS, "ptxas", "Value 'sm_103a' is not defined for option 'gpu-name'", "PTXASError"),
    (f"{LINE_23}Feature '.tile' not supported", "ptxas", "Feature '.tile' not supported", "PTXASError"),
    (DIED, "process", DIED, ""),
    (SILENCE, "process", SILENCE, ""),
    (UNDEFINED, "frontend", "NameError('y is not defined')", "CompilationError"),
)
def test_what_a_compiler_says(said, stage, message, exception):
    assert failure(said) == {"stage": stage, "message": message, "exception": exception}


def test_the_place_in_the_locate_failing_pass():
    found = locate_failing_pass(PASS)
    assert found == "tritongpu-pipeline{dump-intermediate-steps=false num-stages=4}, pass 4 of 5"
    assert locate_failing_pass(SILENT) == locate_failing_pass(PTXAS) == locate_failing_pass("") == ""
    twice = PASS.replace("TritonGPUPipeline", "Canonicalizer")
    assert locate_failing_pass(twice) == "", "a pass that occurs twice has no position"


def test_a_symptom_is_a_bug_not_its_sizes():
    row = {"outcome": "fails", "stage": "A", "message": "8192 elements"}
    assert symptom(row) == symptom(row | {"message": "64 elements"})
    assert symptom(row) != symptom(row | {"stage": "B"}) and symptom(row) != symptom(row | {"message": "x"})
    assert symptom({"outcome": "builds"})[0] == "builds"


def made_up(fails, hunt=LOOP):
    """Builds that fail where `fails(config)` names a stage."""
    rows = []
    for config in grid(hunt):
        row = {"hunt": hunt.name, "triton": "9.9.9", "target": "sm_90a", **config, "status": "ok"}
        stage = fails(config)
        rows.append(
            row | ({"outcome": "fails", "stage": stage, "message": ""} if stage else {"outcome": "builds"})
        )
    return Builds(hunt, "9.9.9", "sm_90a", rows)


@pytest.mark.parametrize("axis", ["LOOP", "num_stages", "num_warps"])
def test_bisect_finds_the_simplest_of_any_threshold(axis):
    values = LOOP.axes[axis]
    for first, start in itertools.combinations_with_replacement(range(len(values)), 2):
        builds = made_up(lambda config, first=first: "A" * (values.index(config[axis]) >= first))
        config = grid(LOOP)[0] | {axis: values[start]}
        wanted = symptom(builds.ask([config])[0])
        step = bisect(builds, config, axis, wanted)
        assert step.config == config | {axis: values[first]}
        assert len(step.rows) <= 1 + math.ceil(math.log2(max(start, 1)))
    assert "so " in str(step)


def test_a_search_ends_at_the_smallest_trigger_and_states_its_rule():
    def fails(config):
        return "A" * (
            config["BLOCK_K"] >= 64 and config["num_warps"] in (4, 8) and config["LOADS"] != "pointers"
        )

    builds = made_up(fails)
    found = find(builds)
    assert describe(found.config) == "LOOP=plain, LOADS=device, BLOCK_K=64, num_stages=1, num_warps=4"
    assert found.sentence == (
        'Triton 9.9.9, sm_90a, a GEMM loop: A fails () where LOADS is "device" or "host" (not '
        '"pointers") and BLOCK_K is 64 or 128 (not 32) and num_warps is 4 or 8 (not 2 or 16); '
        "LOOP, num_stages make no difference."
    )
    assert all(found.predicts(config) == bool(fails(config)) for config in grid(LOOP))
    assert len(found.probes) == 12 and all(predicted == shown for _, predicted, shown in found.probes)
    assert {predicted for _, predicted, _ in found.probes} == {True, False}
    assert len(builds.rows) < len(grid(LOOP)) / 5


def test_a_rule_that_is_no_product_shows_in_the_probes():
    def fails(config):
        return "A" * (config["num_stages"] > 1 or config["num_warps"] == 2)

    found = find(made_up(fails), {**LOOP.start, "num_warps": 8}, probes=200)
    assert [each for each, predicted, shown in found.probes if predicted != shown]


def test_a_search_keeps_to_one_bug():
    def fails(config):  # another bug lies on the way to what is simplest
        return "B" if config["LOADS"] == "pointers" else "A" * (config["LOADS"] == "host")

    found = find(made_up(fails), LOOP.start | {"LOADS": "host"})
    assert found.config["LOADS"] == "host" and symptom(found.row)[1] == "A"
    assert str(found.steps[0]) == "LOADS: pointers fails elsewhere, device builds; so host is kept"


def test_nothing_to_find():
    builds = made_up(lambda config: "")
    neighbours = sum(len(values) - 1 for values in LOOP.axes.values())
    assert find(builds, reach=1) is None and len(builds.rows) == 1 + neighbours
    two_away = made_up(lambda config: "A" * (config["num_warps"] == 2 and config["BLOCK_K"] == 32))
    assert find(two_away, reach=1) is None


def test_everything_fails():
    found = find(made_up(lambda config: "A"))
    assert found.config == grid(LOOP)[0] and found.sentence.endswith("A fails (), whatever the axes.")


@cases(
    "change, sentence",
    ({"LOOP": "round"}, "LOOP must be one of plain, guarded, .*; it is 'round'"),
    ({"num_warps": 3}, "num_warps must be one of 2, 4, 8, 16; it is 3"),
    ({"TILE": 3}, "a configuration of loop must have LOOP, .*; it has .*TILE"),
)
def test_no_configuration(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        find(made_up(lambda config: ""), LOOP.start | change)


def test_a_record_answers_as_its_builds_did_and_says_what_it_lacks():
    rows = experiments.load_record("loop").rows
    found = find(Builds(LOOP, "3.5.0", "sm_100a", rows))
    assert describe(found.config) == "LOOP=carry b, LOADS=pointers, BLOCK_K=32, num_stages=2, num_warps=4"
    assert found.row["stage"] == "TritonGPUAssignLatencies" and not found.builds.live
    assert found.builds.compiler_output(found.config) == ""
    says = "no build of LOOP=plain.* with Triton 3.5.0 for sm_90a is recorded"
    with pytest.raises(Unsupported, match=says):
        find(Builds(LOOP, "3.5.0", "sm_90a", rows))


@pytest.mark.compile
def test_a_triton_in_a_folder_must_be_the_one_that_was_asked_for(tmp_path):
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "good/triton").symlink_to(triton.__path__[0])
    (tmp_path / "bad/triton").mkdir()
    (tmp_path / "bad/triton/__init__.py").write_text("raise ImportError('half of it')")
    job = LOOP.job(LOOP.start | {"num_warps": 4, "BLOCK_K": 32}, "sm_100a")
    assert build.build_one(job, triton=(triton.__version__, tmp_path / "good")).counts["tcgen05_mma"]
    for version, folder, found in (("3.5.1", "empty", triton.__version__), ("3.5.1", "bad", ".*half of it")):
        says = f"{folder} must hold Triton {version}, but Python imports {found}"
        with pytest.raises(Unsupported, match=says):
            build.build_one(job, triton=(version, tmp_path / folder))


@pytest.mark.fault
def test_a_process_that_llvm_called_an_error_in_builds_nothing_more():
    carried = LOOP.start | {"LOOP": "carry both", "BLOCK_K": 64, "num_warps": 8}

    def lease():
        return worker_pool.lease_worker("tilelab.runtime.build_worker", "the compiler", TRITON_INTERPRET="0")

    with lease() as worker:
        worker.stop()
    report = build.build_one(LOOP.job(carried, "sm_100a"))
    assert "LLVM ERROR" in report.compiler_output
    assert report.compiler_output.startswith("RuntimeError: PassManager::run failed")
    with lease() as worker:
        assert not worker.alive
    builds = Builds(LOOP, environments.installed_version(), "sm_100a")
    assert builds.ask([carried | {"LOOP": "plain"}])[0]["outcome"] == "builds"
