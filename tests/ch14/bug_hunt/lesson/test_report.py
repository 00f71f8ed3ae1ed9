"""Reports: the reduced source, what runs it, and the text. One live hunt through the command line serves them all."""

import ast
import contextlib
import io
import json
import re

import pytest

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Builds, environments, grid, locate_failing_pass
from ch14.bug_hunt.lesson import experiments, report
from ch14.bug_hunt.lesson.command import COMMAND as command
from ch14.bug_hunt.lesson.report import reduce_source
from tilelab.records import results

INSTALLED = environments.installed_version()
FIXED = {"num_stages": 2, "BLOCK_K": 32, "num_warps": 4}  # axes that put only a number into the source


@pytest.mark.parametrize("name", HUNTS)
def test_every_reduced_source_has_no_choice_left(name):
    hunt, sources = HUNTS[name], set()
    chosen = [
        config
        for config in grid(hunt)
        if all(config.get(axis, value) == value for axis, value in FIXED.items())
    ]
    for config in chosen:
        job = hunt.job(config, hunt.target)
        source, signature = reduce_source(job)
        tree = ast.parse(source)
        kernel = tree.body[-1]
        arguments = [each.arg for each in kernel.args.args]
        names = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
        assert arguments == list(signature) and all(argument in names for argument in arguments)
        assert not names & set(job.constants), config
        branches = [each for each in ast.walk(kernel) if isinstance(each, ast.If)]
        assert not [each for each in branches if isinstance(each.test, ast.Constant)]
        assert ("load_tile" in source) == (config.get("LOADS") == "pointers"), "one expression is inlined"
        assert ("make_tensor_descriptor" in source) == (config.get("LOADS") == "device")
        sources.add(source)
    constants = {str(sorted(hunt.job(config, hunt.target).constants.items())) for config in chosen}
    assert len(sources) == len(constants)


def test_the_reduced_source_is_this():
    config = {"LOOP": "carry b guarded", "LOADS": "host", "BLOCK_K": 32, "num_stages": 2, "num_warps": 4}
    source, signature = reduce_source(HUNTS["loop"].job(config, "sm_100a"))
    expected = """@triton.jit
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
    assert source == expected
    shapes = {"a": "128, 32", "b": "32, 128", "c": "128, 128"}
    assert signature == {name: f"tensordesc<fp16[{shape}]>" for name, shape in shapes.items()} | {"K": "i32"}


@pytest.fixture(scope="module")
def hunted(tmp_path_factory):
    """The live bug of specialised warps, which fails in 3.6 and 3.7 by two messages: finding, report, record, said."""
    folder, found = tmp_path_factory.mktemp("hunted"), []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setenv("TILES_TRITONS", str(folder / "none"))
        find = bug_hunt.find
        patch.setattr(
            bug_hunt,
            "find",
            lambda *arguments, **options: found.append(find(*arguments, probes=4, **options)) or found[0],
        )
        options = ["--report", str(folder / "report.md"), "--json", str(folder / "rows.json")]
        assert command.main(["--hunt", "warp_specialize", *options]) == 0
    return (
        found[0],
        (folder / "report.md").read_text(),
        json.loads((folder / "rows.json").read_text()),
        said.getvalue(),
    )


@pytest.mark.compile
def test_a_live_hunt(hunted):
    found, text, record, said = hunted
    assert found.config == {"LOOP": "over K", "LOADS": "host", "BLOCK_M": 128, "num_warps": 4}
    assert found.row["stage"] == "NVGPUWarpSpecialization" and found.row["exception"] == "RuntimeError"
    assert list(found.harmless.values()) == [["over tiles flat"], ["pointers", "device"], [64], [8, 16]]
    assert all(predicted == shown for _, predicted, shown in found.probes)
    assert "nvgpu-warp-specialization{" in locate_failing_pass(found.builds.compiler_output(found.config))
    assert len(found.builds.rows) == len({bug_hunt.describe(row) for row in found.builds.rows}), "built twice"
    for part in (
        "LOADS: pointers fails elsewhere, device real; so host is kept",
        "the smallest trigger: LOOP=over K, LOADS=",
        f"Triton {INSTALLED}, sm_90a",
        "behave as this says",
        "nothing was sent",
    ):
        assert part in said, part
    assert set(record) == set(results.KEYS) and record["source"] == experiments.source()
    assert record["device"]["name"] == "no GPU" and record["experiment"] == "ch14_bug_hunt"
    (trigger,) = [row for row in record["rows"] if "sentence" in row]
    assert trigger["status"] == "failed" and trigger["sentence"] in said and trigger["sentence"] in text


@pytest.mark.compile
def test_a_report_is_ready_to_file(hunted):
    found, text, *_ = hunted
    heads = re.findall(r"^#+ (.+)", text, re.MULTILINE)
    assert heads[0] == (
        f"[sm_90a] a GEMM loop with warp_specialize=True: NVGPUWarpSpecialization fails (Triton {INSTALLED})"
    )
    assert heads[1:6] == ["Environment", "Expected", "Observed", "What was varied", "Reproducer"]
    for part in (
        found.sentence,
        f"pip install triton=={INSTALLED}",
        "| BLOCK_M | 128 | 64 |",
        "Exit status 1",
        "Pipeline failed while executing [`NVGPUWarpSpecialization`",
        "RuntimeError: PassManager::run failed",
        "flatten=False, warp_specialize=True",
    ):
        assert part in text, part
    assert not re.search(r"/(home|root|tmp|work|usr)/|Traceback|tt\.func", text), (
        "a path of this machine, or noise"
    )
    script, _ = report.make_script(found)
    assert set(re.findall(r"^(?:import|from) (\w+)", script, re.MULTILINE)) == {"re", "triton"}


@pytest.mark.compile
def test_a_report_of_what_compiles_to_something_else():
    """With eight warps nothing is specialised: the script ends with status 0 and shows the instructions."""
    hunt = HUNTS["warp_specialize"]
    builds, config = Builds(hunt, INSTALLED, "sm_90a"), hunt.start | {"num_warps": 8}
    (row,) = builds.ask([config])
    found = bug_hunt.Finding(
        builds, config, row, [], {axis: [value] for axis, value in config.items()}, dict.fromkeys(config, ())
    )
    text = report.write_report(found)
    assert row["outcome"] == "ignored" and "Exit status 0." in text
    assert f"```\nTriton {INSTALLED} compiled it for sm_90a\nthreads per block: 1\n" in text
    assert "ntid 256" in text and "setmaxnreg: 0" in text


@pytest.mark.compile
def test_no_report_of_what_cannot_be_shown(hunted, monkeypatch):
    monkeypatch.setattr(
        report,
        "reduce_source",
        lambda job: ("@triton.jit\ndef specialized_kernel(a):\n    tl.store(a, 1)", {"a": "*fp16"}),
    )
    with pytest.raises(
        RuntimeError,
        match="the reduced source does not show the bug, so no report is written; the "
        "trigger is LOOP=over K, LOADS=host",
    ):
        report.write_report(hunted[0])


@pytest.mark.fault
def test_a_script_that_never_ends(monkeypatch):
    monkeypatch.setattr(report, "LIMIT_S", 0.5)
    assert report.run_script("while True: pass", None) == (124, "no answer within 0.5 s")
