"""python -m tilelab.emulator says that a kernel is right, or which rule it breaks in which line."""

import json
import pathlib
import re

import pytest
from cases import cases

from tilelab import ROOT, emulator
from tilelab.cells import check_kernel

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]

PAGE = (ROOT / "docs" / "check_your_kernel.md").read_text()
KERNEL, LAUNCH, PRINTED = re.findall(r"```\w*\n(.*?)```", PAGE, re.DOTALL)
RIGHT = ("wait(barrier, 0)", "wait(barrier, (i / gridDim.x) & 1)")


def run(folder: pathlib.Path, *changes, launch=LAUNCH, options=()):
    text = KERNEL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "scale.cu").write_text(text)
    (folder / "launch.py").write_text(launch)
    return check_kernel.main([str(folder / "scale.cu"), "--launch", str(folder / "launch.py"), *options])


def test_the_page_shows_what_the_command_prints(tmp_path, capsys):
    assert run(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[:-1] == PRINTED.splitlines()[:-1]


def test_a_right_kernel_with_host_code(tmp_path, capsys):
    host = "int main() { scale<<<2, 128>>>(nullptr, nullptr, 0); std::vector<int> none; return 0; }\n"
    assert run(tmp_path, RIGHT, ("#include <stdint.h>\n", "#include <stdint.h>\n" + host)) == 0
    said = capsys.readouterr().out
    assert said.startswith("scale in scale.cu is right under 6 timings")
    assert "scale for sm_90a: " in said and "registers" in said


def test_a_kernel_whose_branches_close_the_same_bracket_is_read_to_its_end(tmp_path, capsys):
    end = "        __syncthreads();\n    }\n}"
    branches = end.replace("    }\n}", "#ifdef OTHER\n    }\n#else\n    }\n#endif\n    out[0] = -1;\n}")
    assert run(tmp_path, RIGHT, (end, branches)) == 1
    assert "out" in capsys.readouterr().out


@cases(
    "change, line, said",
    (('"n"(4 * TILE));', '"n"(8 * TILE));'), 7, "has 1 of 1 arrivals and still lacks 1024 bytes"),
    (("b64 [%0], 1;", "b64 [%0], 2;"), 7, "lacks 1 of 2 arrivals"),
    (
        ('"l"(x + i * TILE), "n"(4 * TILE)', '"l"(x + i * TILE), "n"(4 * TILE - 4)'),
        23,
        "whole units of 16 bytes",
    ),
    (('"l"(x + i * TILE)', '"l"(x + i * TILE + 1)'), 23, "between multiples of 16"),
    (("try_wait.parity", "try_again.parity"), 7, "does not know the instruction `mbarrier.try_again.parity"),
)
def test_a_fault_is_named_with_its_line(change, line, said, tmp_path, capsys):
    options = ["--json", "-", "--seeds", "1"]
    status = run(tmp_path, RIGHT, change, options=options)
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    if "instruction" in said:
        assert status == 2 and f"line {line}: " in report["reason"] and said in report["reason"]
        return
    assert status == 1 and report["status"] == "wrong"
    assert report["faults"][0]["line"] == line and said in report["faults"][0]["said"]


def test_a_missing_fence_after_init_is_advice(tmp_path, capsys):
    found = run(tmp_path, RIGHT, ('asm volatile("fence', '// asm volatile("fence'), options=["--seeds", "2"])
    assert found == 0
    assert "Advice: line 23: " in capsys.readouterr().out


def test_a_wrong_result_is_described(tmp_path, capsys):
    assert run(tmp_path, RIGHT, ("2 * tile[j]", "3 * tile[j]")) == 1
    assert re.search(
        r"[\d,]+ of 1,536 elements are wrong; element 0 is \S+ instead of", capsys.readouterr().out
    )


def test_a_wrong_result_comes_with_what_is_suspicious(tmp_path, capsys):
    assert run(tmp_path, RIGHT, ("tile[TILE]", "tile[TILE + 1]"), ("tile[j]", "tile[j + 1]")) == 1
    said = capsys.readouterr().out
    assert re.search(r"line 27: .*reads shared address \d+, which nobody has written; [\d,]+ of 1,536", said)


@cases(
    "launch, options, said",
    ("launch = 3", (), "launch.py defines no function launch(kernel)"),
    ("def launch(scale):\n    scale[1, 128]()", (), "launch.py, line 2: ValueError: scale takes 3 arguments"),
    ("import nowhere", (), "launch.py cannot be run: line 1: ModuleNotFoundError"),
    (LAUNCH, ("--kernel", "gemm"), "the file declares no kernel 'gemm'; it declares scale"),
)
def test_what_cannot_run_has_status_2(launch, options, said, tmp_path, capsys):
    assert run(tmp_path, launch=launch, options=options) == 2
    assert said in capsys.readouterr().err


@cases(
    "options", ["none.cu", "--launch", "launch.py"], ["--seeds", "0"], ["--target", "sm_1"], ["--json", "/"]
)
def test_bad_usage(options, tmp_path):
    (tmp_path / "k.cu").write_text("")
    usual = [] if options[0] == "none.cu" else [str(tmp_path / "k.cu"), "--launch", str(tmp_path / "k.cu")]
    with pytest.raises(SystemExit, match="2"):
        check_kernel.main([*usual, *options])
