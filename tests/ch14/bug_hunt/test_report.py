"""Reports: the reduced source, what runs it, and the text."""

import ast
import re

import pytest

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Builds, environments, grid, report
from ch14.bug_hunt.report import reduce_source

INSTALLED = environments.installed_version()


@pytest.mark.parametrize("name", HUNTS)
def test_every_reduced_source_has_no_choice_left(name):
    hunt, sources = HUNTS[name], set()
    chosen = [config for config in grid(hunt) if config.get("num_stages", 2) == 2 and config["num_warps"] == 4]
    for config in chosen:
        job = hunt.job(config, hunt.target)
        source, signature = reduce_source(job)
        tree = ast.parse(source)
        kernel = tree.body[-1]
        arguments = [each.arg for each in kernel.args.args]
        names = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
        assert arguments == list(signature) and all(argument in names for argument in arguments)
        assert not names & {"LOOP", "LOADS", "BLOCK_M", "BLOCK_N", "BLOCK_K", "FORMAT", "WARP_SPECIALIZE"}, config
        assert not [each for each in ast.walk(kernel) if isinstance(each, ast.If) and isinstance(
            each.test, ast.Constant)]
        assert ("load_tile" in source) == (config.get("LOADS") == "pointers"), "one expression is inlined"
        assert ("make_tensor_descriptor" in source) == (config.get("LOADS") == "device")
        sources.add(source)
    assert len(sources) == len({str(sorted(hunt.job(config, hunt.target).constants.items())) for config in chosen})


def test_the_reduced_source_is_this():
    config = {"LOOP": "carry b guarded", "LOADS": "host", "BLOCK_K": 32, "num_stages": 2, "num_warps": 4}
    source, signature = reduce_source(HUNTS["loop"].job(config, "sm_100a"))
    assert source == """@triton.jit
def loop_kernel(a, b, c, K):
    m = tl.program_id(0) * 128
    n = tl.program_id(1) * 128
    acc = tl.zeros((128, 128), tl.float32)
    right = b.load([0, n])
    for k in range(0, K, 32):
        left = a.load([m, k])
        acc = tl.dot(left, right, acc)
        if k + 32 < K:
            right = b.load([k + 32, n])
    c.store([m, n], acc.to(tl.float16))"""
    assert signature == {"a": "tensordesc<fp16[128, 32]>", "b": "tensordesc<fp16[32, 128]>",
                         "c": "tensordesc<fp16[128, 128]>", "K": "i32"}


@pytest.fixture(scope="module")
def failing():
    """The live bug of specialised warps."""
    return bug_hunt.find(Builds(HUNTS["warp_specialize"], INSTALLED, "sm_90a"), probes=2)


@pytest.fixture(scope="module")
def emulated():
    """GB10's mxfp4 in bf16: it compiles, to something else."""
    builds = Builds(HUNTS["dot_scaled"], INSTALLED, "sm_121a")
    config = HUNTS["dot_scaled"].start
    row = builds.ask([config])[0]
    return bug_hunt.Finding(builds, config, row, [], {axis: [value] for axis, value in config.items()},
                            dict.fromkeys(config, ()))


def test_a_report_is_ready_to_file(failing):
    text = report.write_report(failing)
    heads = re.findall(r"^#+ (.+)", text, re.MULTILINE)
    assert heads == [f"[sm_90a] a GEMM loop with warp_specialize=True: NVGPUWarpSpecialization fails (Triton "
                     f"{INSTALLED})", "Environment", "Minimal source", "Command", "Expected", "Actual",
                     "What was varied"]
    for part in (failing.sentence, f"pip install triton=={INSTALLED}", "| BLOCK_M | 128 | 64 |", "Exit status 1",
                 "Pipeline failed while executing [`NVGPUWarpSpecialization`", "RuntimeError: PassManager::run failed",
                 "flatten=False, warp_specialize=True"):
        assert part in text, part
    assert not re.search(r"/(home|root|tmp|work|usr)/", text), "a path of this machine"


def test_its_source_fails_alone_and_with_eight_warps_runs(failing):
    text, _ = report.make_script(failing)
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) == {"re", "triton"}
    where = environments.locate(INSTALLED)
    status, said = report.run_script(text, where)
    assert status == 1 and "NVGPUWarpSpecialization" in said and "Traceback" not in said and "tt.func" not in said
    status, said = report.run_script(text.replace('"num_warps": 4', '"num_warps": 8'), where)
    assert status == 0 and said.startswith(f"Triton {INSTALLED} compiled it for sm_90a\nthreads a block: 1\n")
    assert "ntid 256" in said and "setmaxnreg: 0" in said


def test_a_report_of_what_compiles_to_something_else(emulated):
    text = report.write_report(emulated)
    assert "Exit status 0." in text and "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in text
    assert "block_scale: 0" in text and "'e2m1'" in text


def test_no_report_of_what_cannot_be_shown(failing, monkeypatch):
    monkeypatch.setattr(report, "reduce_source", lambda job: (
        "@triton.jit\ndef specialized_kernel(a):\n    tl.store(a, 1)", {"a": "*fp16"}))
    with pytest.raises(RuntimeError, match="the reduced source does not show the bug, so no report is written; the "
                                           "trigger is LOOP=over K, LOADS=host"):
        report.write_report(failing)


def test_a_script_that_never_ends(monkeypatch):
    monkeypatch.setattr(report, "LIMIT_S", 1)
    assert report.run_script("while True: pass", None) == (124, "no answer within 1 s")
