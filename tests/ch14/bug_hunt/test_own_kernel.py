"""A hunt in a kernel that the reader brings along, from the command line to the report."""

import pytest
from cases import cases

from ch14.bug_hunt import environments, own_kernel
from ch14.bug_hunt.lesson.command import COMMAND

SOURCE = """
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

SCALE = tl.constexpr(2.0)


@triton.jit
def twice(x):
    return x * SCALE


@triton.autotune([triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr, FORM: tl.constexpr):
    tl.static_assert(BLOCK < 512, "no such block")
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, i < n)
    if FORM == "pow":
        v = libdevice.pow(v, 2.0)
    tl.store(y + i, twice(v), i < n)


def not_a_kernel(x):
    return x
"""
TYPES = "x=*fp32, y=*fp32, n=i32"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.compile
def test_a_hunt_in_a_kernel_of_ones_own_ends_in_a_report(file, tmp_path, capsys):
    report = tmp_path / "report.md"
    status = COMMAND.main(
        [
            *("--kernel", f"{file}:double", "--target", "sm_90a,sm_120a", "--report", str(report)),
            *("--signature", f"{TYPES}, BLOCK=64|512, FORM='plain', num_warps=4, num_stages=2"),
        ]
    )
    said = capsys.readouterr().out
    assert status == 0 and said.count("(no such block) where BLOCK is 512 (not 64)") == 2
    text = report.read_text()
    assert text.startswith("# [sm_90a] the kernel double of mine.py: frontend fails")
    assert "static_assert(False, 'no such block')" in text
    assert "v * SCALE, i < n)" in text and "SCALE = tl.constexpr(2.0)" in text  # the helper is one expression
    assert not any(word in text for word in ("import torch", "autotune", "not_a_kernel"))


@cases(
    "name, signature, says",
    ("double", TYPES, "must have the parameters x, y, n, BLOCK, FORM of double; BLOCK, FORM differs."),
    ("double", f"{TYPES}, BLOCK=64, FORM='a', z=i32", "z differs."),
    ("double", "x=fp32!", "takes a Triton type such as *bf16 or i32, or literals such as 64|128 for x"),
    ("double", "x", "takes NAME=TYPE or NAME=VALUE|VALUE, separated by commas; it has 'x'."),
    ("other", TYPES, "defines twice, double, not_a_kernel at its top level, not 'other'."),
    ("", TYPES, "at its top level, not ''"),
)
def test_bad_usage_is_a_sentence(file, capsys, name, signature, says):
    with pytest.raises(SystemExit):
        COMMAND.main(["--kernel", f"{file}:{name}", "--signature", signature])
    assert says in capsys.readouterr().err


def test_a_signature_alone_or_a_file_that_is_missing_is_a_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, says in (
        (["--signature", TYPES], "--signature goes with --kernel only."),
        (["--kernel", "none.py:k"], "none.py cannot be read"),
        (["--kernel", "none.py"], "--kernel takes FILE.py:NAME; it is 'none.py'."),
        (["--target", "sm_1"], "--target must be some of sm_90a, "),
    ):
        with pytest.raises(SystemExit):
            COMMAND.main(arguments)
        assert says in capsys.readouterr().err


def test_a_signature_is_read():
    types, values = own_kernel.parse_signature(
        "d=tensordesc<bf16[128, 64]>, p=*fp8e4nv, n=i32, B=64|128, F='a'|None"
    )
    assert types == {"d": "tensordesc<bf16[128, 64]>", "p": "*fp8e4nv", "n": "i32"}
    assert values == own_kernel.LAUNCH | {"B": (64, 128), "F": ("a", None)}


@pytest.mark.compile
def test_a_function_without_jit_is_a_sentence(file, capsys):
    status = COMMAND.main(["--kernel", f"{file}:not_a_kernel", "--signature", "x=i32"])
    assert status == 2 and "is no @triton.jit function" in capsys.readouterr().err


def test_a_triton_that_cannot_be_had_is_a_sentence(file, capsys, monkeypatch):
    def refuse(version, report):
        raise environments.Unsupported(f"Triton {version} cannot be installed: no network.")

    monkeypatch.setattr(environments, "install", refuse)
    signature = f"{TYPES}, BLOCK=64, FORM='a'"
    status = COMMAND.main(["--kernel", f"{file}:double", "--signature", signature, "--triton", "3.5.1"])
    assert status == 2 and "Triton 3.5.1 cannot be installed: no network." in capsys.readouterr().err
