import os
import sys
import threading

import numpy
import pytest
import torch
from cases import cases

from tilelab.measure import check
from tilelab.runtime import device


def spec(x):
    return x.double() * 2


def out(x):
    return tuple(x.shape), x.dtype


def right(x, out):
    out.copy_(x * 2)


def short(x, out):
    out[:-1] = x[:-1] * 2


def beyond(x, out):
    out.copy_(x * 2)
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(1)


def before(x, out):
    out.copy_(x * 2)
    torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).fill_(1)


def off(x, out):
    out.copy_(x * 2)
    out[3, 3] += 1


def find_reasons(kernel, cases, spec=spec, **options):
    """The reason of each case, "" for a right one."""
    return [row["reason"] for row in check.compare(kernel, spec, cases, out=out, **options)]


CASES = [("one", (torch.randn(8, 16).half(),)), ("two", (torch.randn(5, 3),))]


def test_right_kernel_passes():
    rows = check.compare(right, spec, CASES, out=out)
    assert [row["status"] for row in rows] == ["ok", "ok"] and rows[0]["shape"] == [8, 16]


@cases(
    "kernel, message",
    (short, "16 of 128 elements are not finite, or were never written"),
    (beyond, "1 elements outside the output were overwritten"),
    (before, "1 elements outside the output were overwritten"),
)
def test_wrong_kernel_is_caught(kernel, message):
    assert find_reasons(kernel, CASES)[0] == message


def test_one_wrong_element_is_caught():
    (reason,) = find_reasons(off, CASES[:1])
    assert reason.startswith("the error ") and reason.endswith(" is above 9.8e-04")


def test_the_peer_sets_the_limit():
    row = check.compare(right, spec, CASES[:1], out=out, peer=lambda x: spec(x) + 0.1)[0]
    assert row["tolerance"] == pytest.approx(1.5 * row["peer_error"]) and row["status"] == "ok"
    assert check.compare(off, spec, CASES[:1], out=out, peer=lambda x: spec(x))[0]["status"] == "wrong"


def test_exercise_prints_and_never_raises(capsys):
    def stub():
        raise NotImplementedError

    def wrong():
        assert 1 + 1 == 3, "one and one"

    for test in (stub, wrong, lambda: None, lambda: 1 / 0, lambda: {}["split"]):
        check.check_exercise("E", test)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "E: not solved yet." and said[1].startswith("E: not yet right (one and one")
    assert said[2] == "E: solved." and "division by zero" in said[3]
    assert said[4] == "E: not yet right (KeyError: 'split')."


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_caught(value):
    def kernel(x, out):
        right(x, out)
        out[0, 0] = value

    assert find_reasons(kernel, CASES[:1])[0].startswith("1 of 128 elements are not finite")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_proves_nothing(value):
    def broken_spec(x):
        reference = spec(x)
        reference[0, 0] = value
        return reference

    assert check.compare(off, broken_spec, CASES[:1], out=out)[0]["status"] == "wrong"


def test_a_peer_that_is_not_finite_sets_no_limit():
    row = check.compare(off, spec, CASES[:1], out=out, peer=lambda x: spec(x) * float("nan"))[0]
    assert row["status"] == "wrong"


@pytest.mark.parametrize("shape", [(7,), (4, 6)])
@pytest.mark.parametrize("dtype", check.TOLERANCE)
def test_poisoned_output_is_all_nan_and_guarded_on_both_sides(shape, dtype):
    inside, touched = check.make_poisoned(shape, dtype, "cpu")
    assert inside.shape == shape and inside.double().isnan().all()
    inside.fill_(1)
    assert touched() == ""
    torch.as_strided(inside, (1,), (1,), inside.storage_offset() + inside.numel()).fill_(1)
    assert touched() == "1 elements outside the output were overwritten"


def test_a_kernel_that_damages_its_inputs_is_caught():
    def bad(x, out):
        x.zero_()
        out.zero_()

    assert check.compare(bad, spec, [("one", (torch.randn(8, 16),))], out=out)[0]["status"] == "wrong"


@pytest.mark.parametrize("dtype", check.FORMAT, ids=str)
def test_ulps_of_a_rounded_result_and_of_its_neighbours(dtype):
    bits, least = check.FORMAT[dtype]
    scale = torch.randint(-20, 13, (20_000,)).double()
    reference = torch.randn(20_000, dtype=torch.float64) * torch.exp2(scale)
    rounded = reference.to(dtype)
    assert 0.45 < check.ulps(rounded, reference) < 0.501  # torch rounds to two bytes by way of float32
    exact = rounded.double()
    assert check.ulps(rounded, exact) == 0
    step = torch.exp2((torch.frexp(exact)[1] - bits).clamp(min=least).double())
    step[exact == 0] = 2.0**least
    found = check.ulps((exact - 2 * step).to(dtype), exact) / 2
    assert check.ulps((exact + step).to(dtype), exact) == found == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_ulps_are_numpy_s_spacing(dtype):
    exact = torch.tensor(
        [1.0, 1.5, 0.9990234375, 2.0**-14, 2.0**-24, 3 * 2.0**-24, 1024.0, 60000.0], dtype=dtype
    )
    numbers = exact.numpy()
    for index, spacing in enumerate(numpy.spacing(numbers)):
        beyond = torch.from_numpy(numbers[index : index + 1] + spacing)
        assert check.ulps(beyond, exact[index : index + 1].double()) == 1


def test_ulps_count_the_smallest_steps_below_the_normal_numbers():
    assert check.ulps(torch.tensor([2.0**-24]).half(), torch.tensor([2.0**-30]).double()) == 1 - 2.0**-6
    assert check.ulps(torch.tensor([3 * 2.0**-133]).bfloat16(), torch.tensor([2.0**-133]).double()) == 2


@pytest.mark.parametrize("result", [float("nan"), float("inf"), -float("inf")])
def test_ulps_of_what_is_no_number_are_infinite(result):
    assert check.ulps(torch.tensor([1.0, result]), torch.ones(2).double()) == float("inf")
    assert check.ulps(torch.ones(3), torch.ones(2).double()) == float("inf")
    assert check.ulps(torch.ones(0), torch.ones(0).double()) == 0


def test_ulps_of_a_result_beside_zero():
    assert check.ulps(torch.tensor([1e-9]), torch.zeros(1).double()) > 1


def test_ulps_of_a_reference_that_is_no_number():
    assert check.ulps(torch.zeros(1), torch.full((1,), float("nan")).double()) == float("inf")


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """A compute-sanitizer that says and does what it is told."""

    def made(shell):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!/bin/sh\n{shell}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return check.sanitize("ch07.resample.lesson.experiments")[0]

    return made


@cases(
    "shell, status, reason",
    ("echo '========= ERROR SUMMARY: 0 errors'", "ok", "ERROR SUMMARY: 0 errors"),
    ("echo; exit 0", "wrong", "no summary, exit status 0"),
    (
        "echo 'Target application terminated before first instrumented API call'",
        "wrong",
        "no summary, exit status 0 (Target application",
    ),
    (
        "echo 'ERROR SUMMARY: 0 errors'; echo ImportError: no >&2; exit 1",
        "wrong",
        "ERROR SUMMARY: 0 errors, exit status 1 (ImportError: no)",
    ),
    ("printf 'first\\nInvalid read\\nERROR SUMMARY: 2 errors\\n'; exit 9", "wrong", "Invalid read: ERROR"),
    ("kill -9 $$", "wrong", "no summary, exit status -9"),
    ("printf '\\377 ERROR SUMMARY: 0 errors\\n'", "ok", "ERROR SUMMARY: 0 errors"),
)
def test_the_sanitizer_is_clean_only_where_it_says_so(sanitizer, shell, status, reason):
    row = sanitizer(shell)
    assert row["status"] == status and reason in row["reason"], row


def test_cases_without_memory_are_no_verdict(sanitizer):
    with pytest.raises(torch.OutOfMemoryError, match="memcheck ended without a verdict"):
        sanitizer(
            "echo 'ERROR SUMMARY: 0 errors'; echo 'CUDA error: out of memory' >&2; echo Compile with >&2; exit 1"
        )


def test_racecheck_is_shared_out(sanitizer):
    sanitizer("""case "$2 $*" in
racecheck*'sanitizer_cases(1, 3)'*)
  printf 'first\\nRace reported between one in a and b\\nRACECHECK SUMMARY: 1 hazard\\n'; exit 9;;
racecheck*'sanitizer_cases('[02]', 3)'*|memcheck*'sanitizer_cases()'*) echo 'SUMMARY: 0 errors';;
esac""")
    rows = check.sanitize("ch07.resample.lesson.experiments", shares=3)
    found = {row["tool"]: (row["status"], row.get("races")) for row in rows}
    assert found == {"memcheck": ("ok", None), "racecheck": ("wrong", ["one"]), "synccheck": ("wrong", None)}


def test_what_is_attempted_may_hang_or_fail():
    assert check.run_snippet("print('begun'); print('seen')", 120) == (0, "seen\n", "")
    assert check.run_snippet("import time; print('begun', flush=True); time.sleep(60)", 0.3) == (None, "", "")
    status, said, errors = check.run_snippet("1 / 0", 120)
    assert status == 1 and not said and "ZeroDivisionError" in errors


@cases(
    "found, status, reason",
    ((None, "", ""), "failed", "no answer within 10 s"),
    ((-11, "", ""), "failed", "exit status -11"),
    ((1, '{"status": "ok"}', "Error: CUDA error: a fault\nmore"), "failed", "CUDA error: a fault"),
    ((0, '{"status": "ok", "reason": "right"}', "a warning"), "ok", "right"),
)
def test_the_end_of_a_process_is_a_row(monkeypatch, found, status, reason):
    monkeypatch.setattr(check, "run_snippet", lambda code, limit_s: found)
    assert check.try_rows("", 10) == {"status": status, "reason": reason}


def test_side_by_side_is_at_once_and_in_order(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a"))
    met = threading.Barrier(3)
    found = check.run_side_by_side(*[lambda name=name: (met.wait(60), name)[1] for name in "abc"])
    assert found == ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError):
        check.run_side_by_side(lambda: 1 / 0, lambda: 1)


def test_without_the_sanitizer(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(device.Unsupported, match="compute-sanitizer is not on the PATH"):
        check.sanitize("ch07.resample.lesson.experiments")


def test_an_answer_that_exits_does_not_end_the_notebook(capsys):
    check.check_exercise("A", lambda: sys.exit(0))
    found = capsys.readouterr().out
    assert found == "A: not yet right (the answer calls exit, which would end the notebook).\n"
