"""Tables of tuned configurations: what is kept, what is replaced, and what is passed over."""

import json
import math
import multiprocessing

import pytest
from cases import cases

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.lesson.command import COMMAND as wgmma_main
from ch10.wgmma_gemm.lesson.sweep import WgmmaSpace
from ch14 import fp8_gemm, gemm
from ch14.fp8_gemm.lesson.command import COMMAND as fp8_main
from ch14.fp8_gemm.lesson.sweep import Fp8Space
from ch14.gemm.configs import GemmConfig, configs
from ch14.gemm.lesson.command import COMMAND as gemm_main
from ch14.gemm.lesson.sweep import GemmSpace
from tilelab.runtime import device, plans, tuned
from tilelab.sweeps import quick, sweep, tune

GPU = "NVIDIA H200"
WHOLE, SPLIT = GemmConfig(128, 128, 64, 4, 3, "persistent"), GemmConfig(64, 64, 128, 4, 4, "split", splits=2)
ROW = {"m": 64, "n": 4096, "k": 8192, "dtype": "bf16", "config": WHOLE, "us": 20.0, "peer": "cuBLAS"}
ROW |= {"peer_us": 20.0, "ratio": 1.0, "spread": 0.02, "tried": 9, "source": "1"}

WRITTEN = ROW | {"name": "whole", "config": {}}  # as a file holds it
ODD = [{"m": 10**400}, {"n": True}, {"k": 8.0}, {"dtype": None}, {"us": math.inf}, {"us": math.nan}]
ODD += [{"ratio": "fast"}, {"config": [[]]}, {"config": {"block_m": 10**400}}]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_TUNED", str(tmp_path))
    monkeypatch.setattr(device, "current", lambda: device.Device(GPU, (9, 0), "sm_90a", 132))
    return tmp_path


def find(m, n, k, can_run=lambda config: True, **rest):
    return tuned.find_exact("gemm", GemmConfig, m, n, k, "bf16", can_run, **rest)


def test_a_row_comes_back_for_its_shape():
    assert find(64, 4096, 8192) is None
    tuned.keep("gemm", [ROW, ROW | {"m": 256, "config": SPLIT}], GPU)
    assert find(64, 4096, 8192) == (WHOLE, "tuned")
    assert find(256, 4096, 8192) == (SPLIT, "tuned")
    assert find(100, 4096, 8192) is None


def test_what_cannot_run_or_is_not_known_is_passed_over(folder):
    tuned.keep("gemm", [ROW, ROW | {"m": 256, "config": SPLIT}], GPU)
    assert find(64, 4096, 8192, can_run=lambda config: config == SPLIT) is None
    path = tuned.table_path("gemm", GPU)
    table = json.loads(path.read_text())
    table["rows"][0]["config"] |= {"a field of another version": 1}
    table["rows"][1]["config"]["num_warps"] = 7
    path.write_text(json.dumps(table))
    assert find(64, 4096, 8192) is None


def test_a_table_of_another_gpu_is_not_used(monkeypatch):
    tuned.keep("gemm", [ROW], "NVIDIA H100")
    assert find(64, 4096, 8192) is None


@cases(
    "new, said, kept",
    ({"config": SPLIT, "ratio": 1.01}, "keeps", WHOLE),
    ({"config": SPLIT, "ratio": 1.03}, "in place of", SPLIT),
    ({"config": SPLIT, "ratio": 1.03, "spread": 0.05}, "keeps", WHOLE),
    ({"ratio": 0.9}, "0.90 × cuBLAS", WHOLE),
    ({"config": SPLIT, "ratio": 0.9, "source": "2"}, "in place of", SPLIT),
)
def test_a_row_is_replaced_only_by_a_faster_one_or_for_another_kernel(new, said, kept):
    tuned.keep("gemm", [ROW], GPU)
    (sentence,) = tuned.keep("gemm", [ROW | new], GPU)
    assert said in sentence and sentence.endswith(".") and find(64, 4096, 8192)[0] == kept


def test_replace_is_asked_for():
    tuned.keep("gemm", [ROW], GPU)
    tuned.keep("gemm", [ROW | {"config": SPLIT, "ratio": 0.5}], GPU, replace=True)
    assert find(64, 4096, 8192)[0] == SPLIT


@cases(
    "damage",
    "",
    "{",
    "[]",
    '{"gpu": "NVIDIA H200", "rows": [{"m": 1}]}',
    '{"gpu": "NVIDIA H100", "rows": []}',
    '{"gpu": "NVIDIA H200", "rows": [{"m": 0, "n": 8, "k": 8, "us": 1, "config": {}}]}',
    "[" * 100_000,
    '{"gpu": "NVIDIA H200", "rows": 5}',
    *(json.dumps({"gpu": GPU, "rows": [{**WRITTEN, **odd}]}) for odd in ODD),
    json.dumps({"gpu": GPU, "rows": [{key: WRITTEN[key] for key in WRITTEN if key != "dtype"}]}),
)
def test_a_damaged_table_is_left_as_it_is_and_serves_nobody(damage):
    path = tuned.table_path("gemm", GPU)
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    assert find(64, 4096, 8192) is None
    says = "is no table of tuned configurations for NVIDIA H200 .*: mend it or delete"
    with pytest.raises(ValueError, match=says):
        tuned.keep("gemm", [ROW], GPU)
    assert path.read_text() == damage


def test_a_table_that_is_no_text_is_none(folder):
    path = tuned.table_path("gemm", GPU)
    path.mkdir(parents=True)
    assert find(64, 4096, 8192) is None
    path.rmdir()
    path.write_bytes(b"\xff\x00")
    assert find(64, 4096, 8192) is None


def _keep_many(first: int) -> None:
    for m in range(first, first + 40, 2):
        tuned.keep("gemm", [ROW | {"m": m}], GPU)


@pytest.mark.fault
def test_two_processes_keep_all_rows():
    context = multiprocessing.get_context("fork")  # a new process would import torch
    both = [context.Process(target=_keep_many, args=(first,)) for first in (1, 2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert len(tuned.load("gemm", GPU)) == 40


def test_shapes_of_the_repository_are_chosen_by_measured_errors(monkeypatch):
    monkeypatch.delenv("TILES_TUNED")
    near = "by the model and its errors near "
    monkeypatch.setattr(device, "current", lambda: device.Device(GPU, (9, 0), "sm_90a", 132))
    assert gemm.find_best(256, 5120, 25600, "bf16", True, "sm_90a", 132)[1].startswith(near)
    assert gemm.find_best(256, 5120, 25600, "bf16", False, "sm_90a", 132)[1] == "by the model"
    assert wgmma_gemm.find_best(8, 8, 8)[1].startswith(near)


@cases(
    "text, said",
    ("16,4096,4096\nx,1,2", "line 2 of"),
    ("16,4096", "line 1 of"),
    ("0,8,8", "line 1 of"),
    ("8,9,8", "N a multiple of 8 and K of 8"),
    ("# nothing", "no shapes"),
    (f"{2**31},8,8", "below 2"),
)
def test_a_bad_line_of_shapes_is_one_sentence(text, said, tmp_path):
    (tmp_path / "shapes.txt").write_text(text)
    with pytest.raises(ValueError, match=said):
        tune.read_shapes(str(tmp_path / "shapes.txt"))


def test_a_file_of_shapes_that_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, reason in (
        ("missing", "No such file or directory"),
        ("binary", "it is no text"),
        ("", "Is a directory"),
    ):
        with pytest.raises(ValueError, match=rf"^the file of shapes .* cannot be read \({reason}\)\.$"):
            tune.read_shapes(str(tmp_path / name))


def test_shapes_are_read(tmp_path):
    (tmp_path / "shapes.txt").write_text("16,4096,4096  # a layer\n\n64 8 72\n")
    assert tune.read_shapes(str(tmp_path / "shapes.txt")) == [(16, 4096, 4096), (64, 8, 72)]
    with pytest.raises(ValueError, match="line 3 of .* N a multiple of 8 and K of 128; it is '64 8 72'"):
        tune.read_shapes(str(tmp_path / "shapes.txt"), (8, 128))


def test_the_tuner_tries_first_what_the_model_prefers(monkeypatch):
    monkeypatch.setattr(GemmSpace, "candidates", lambda space: [*configs("course").values()])
    space = GemmSpace((4096, 4096, 4096))
    first = tune.choose_candidates(space, 0.1)[0]
    assert first.name.startswith("128×128×64 · 4 warps · 3 stages")
    assert len(tune.choose_candidates(space, 0.1)) == 4 and len(tune.choose_candidates(space)) == 8


def test_a_row_of_other_code_is_used_and_says_so():
    tuned.keep("gemm", [ROW], GPU)
    for source, said in (("1", ""), ("2", ", for another version of the kernel")):
        assert find(64, 4096, 8192, source=lambda source=source: source) == (WHOLE, "tuned" + said)


def test_a_kept_row_makes_operators_plan_anew():
    planner = plans.Planner(None, ("a",))
    planner.plans["a kind of arguments"] = None
    tuned.keep("gemm", [ROW], GPU)
    assert not planner.plans
    plans._planners.remove(planner)


def test_fp8_takes_the_tuned_tile():
    wide, narrow = fp8_gemm.Fp8Config(2, 2, 5, 128, splits=2, pdl=True), fp8_gemm.Fp8Config(1, 2, 11, 64)
    row = ROW | {"dtype": "fp8", "source": fp8_gemm.tuned_source()}
    assert fp8_gemm.find_best(64, 4096, 8192, 132)[1].startswith("by the model")
    tuned.keep("fp8", [row | {"config": narrow}, row | {"config": wide, "m": 256}], GPU)
    assert fp8_gemm.find_best(64, 4096, 8192, 132) == (narrow, "tuned")
    assert fp8_gemm.find_best(64, 4096, 8192, 132, mx=True)[0].block_n == 128
    assert fp8_gemm.find_best(256, 4096, 128, 132)[1].startswith("by the model")


# ---- the command line, with a tuner that measures nothing


TUNERS = {
    "ch14.gemm": (gemm_main, GemmSpace),
    "ch10.wgmma_gemm": (wgmma_main, WgmmaSpace),
    "ch14.fp8_gemm": (fp8_main, Fp8Space),
}


@pytest.fixture
def rows(monkeypatch):
    """The rows that the tuner finds; an exception among them is raised in its place."""
    found = []

    def tune_shapes(kernel, shapes, share):
        for row in found:
            if not isinstance(row, dict):
                raise row
            yield row

    monkeypatch.setattr(tune, "tune_shapes", tune_shapes)
    return found


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.txt"
    path.write_text("64,4096,8192\n")
    return path


@pytest.mark.parametrize("module", TUNERS)
def test_tune_keeps_what_it_finds(module, rows, shapes, capsys):
    main, kernel = TUNERS[module]
    config = kernel((64, 4096, 8192)).candidates()[0]
    rows += [ROW | {"config": config, "dtype": kernel.table_dtype}, ROW | {"config": None}]
    assert main.main(["--tune", str(shapes)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("64 × 4096 × 8192: ")
    assert "no configuration gave the right result" in printed[1]
    assert printed[2] == f"The table is {tuned.table_path(kernel.table, GPU)}."
    assert len(tuned.load(kernel.table, GPU)) == 1
    del rows[1]
    assert main.main(["--tune", str(shapes)]) == 0


@pytest.mark.parametrize("module", TUNERS)
@cases("text, said", ("64,4096,100", "line 1 of"), (None, "No such file"))
def test_a_bad_file_of_shapes_is_one_line(module, text, said, rows, shapes, capsys):
    shapes.unlink() if text is None else shapes.write_text(text)
    assert TUNERS[module][0].main(["--tune", str(shapes)]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1
    assert printed.err.startswith(f"python -m {module}: ")
    assert said in printed.err


def test_what_stops_the_tuner_is_said_before_the_work(rows, shapes, capsys, monkeypatch, folder):
    path = tuned.table_path("gemm", GPU)
    path.parent.mkdir()
    path.write_text("{")
    assert gemm_main.main(["--tune", str(shapes)]) == 2 and "mend it or delete it" in capsys.readouterr().err
    monkeypatch.setenv("TILES_TUNED", str(path))
    assert gemm_main.main(["--tune", str(shapes)]) == 2 and "is no folder" in capsys.readouterr().err
    monkeypatch.setattr(device, "current", lambda: device.Device("B200", (10, 0), "sm_100a", 148))
    assert wgmma_main.main(["--tune", str(shapes)]) == 2 and "needs WGMMA" in capsys.readouterr().err


def test_ctrl_c_keeps_the_shapes_that_are_done(rows, shapes, capsys):
    rows += [ROW, KeyboardInterrupt()]
    assert gemm_main.main(["--tune", str(shapes)]) == 130
    assert "cancelled; the shapes that were printed are kept" in capsys.readouterr().err
    assert find(64, 4096, 8192) == (WHOLE, "tuned")


def test_a_shape_that_the_library_refuses_does_not_end_the_run(monkeypatch, shapes, capsys):
    def refuse(space, *tensors):
        raise ValueError("scale_a must have strides (1, 1); got [1, 128]\nand more")

    monkeypatch.setattr(quick.bench, "make_input_sets", lambda make: [()])
    monkeypatch.setattr(sweep, "build_configuration", lambda *_: {"status": "ok", "reason": ""})
    monkeypatch.setattr(
        sweep,
        "call_in_gpu_worker",
        lambda method, space, arguments, *_: {"value": getattr(space, method)(*arguments)},
    )
    monkeypatch.setattr(Fp8Space, "prepare_peer", refuse)
    monkeypatch.setattr(device, "same_model_uuids", lambda: [])
    assert tune.run(Fp8Space, str(shapes)) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        "64 × 4096 × 8192: scaled_mm refuses the shape: scale_a must have strides (1, 1); got [1, 128]."
    ) and printed[1].startswith("The table is")
