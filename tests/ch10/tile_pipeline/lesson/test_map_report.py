"""The report of a load by tensor map that fails: its rules, its reproducer, and the command that writes it."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch
from cases import cases
from planted import rarely

from ch10.tile_pipeline.lesson import map_report
from ch10.tile_pipeline.lesson.command import COMMAND as command
from ch10.tile_pipeline.lesson.map_report import parse_load
from tilelab.runtime import cuda, device, files, tensor_map

GOOD = "shape=100x64,box=16x32"
WHOLE = "dtype=bfloat16,shape=7x100x64,box=2x16x32,swizzle=64B,l2_promotion=128B,fill=nan,start=16"
ILLEGAL = "load_box: CUDA error: an illegal instruction was encountered"
needs_no_gpu = pytest.mark.skipif(device.current().has_tma, reason="this GPU runs the load")


def run(capsys, *arguments):
    try:
        status = command.main(list(arguments))
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    return status, said.out, said.err


def test_fields_are_those_of_the_driver():
    load = parse_load(WHOLE)
    assert load.fields() == {
        "tensorDataType": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
        "tensorRank": 3,
        "globalAddress": 16,
        "globalDim": [64, 100, 7],
        "globalStrides": [128, 12800],
        "boxDim": [32, 16, 2],
        "elementStrides": [1, 1, 1],
        "interleave": "CU_TENSOR_MAP_INTERLEAVE_NONE",
        "swizzle": "CU_TENSOR_MAP_SWIZZLE_64B",
        "l2Promotion": "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
        "oobFill": "CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA",
    }


def test_fields_have_names_that_the_driver_s_binding_knows():
    from cuda.bindings import driver

    kinds = (driver.CUtensorMapDataType, driver.CUtensorMapInterleave, driver.CUtensorMapSwizzle)
    kinds += (driver.CUtensorMapL2promotion, driver.CUtensorMapFloatOOBfill)
    known = {name for kind in kinds for name in kind.__members__}
    for dtype in map_report.DTYPES:
        for swizzle, promotion, fill in zip(tensor_map.SWIZZLES, tensor_map.PROMOTIONS, ("zero", "nan") * 2):
            text = f"dtype={dtype},shape=512x256,box=8x256,swizzle={swizzle},l2_promotion={promotion},fill={fill}"
            assert {value for value in parse_load(text).fields().values() if isinstance(value, str)} <= known


@pytest.mark.parametrize("status, name", [(0, "CUDA_SUCCESS"), (1, "CUDA_ERROR_INVALID_VALUE")])
def test_the_driver_gets_the_fields_and_an_aligned_map(monkeypatch, status, name):
    calls = []

    class Driver:
        def __init__(self, library):
            assert library == "libcuda.so.1"

        def cuTensorMapEncodeTiled(self, *arguments):
            calls.append(arguments)
            return status

    monkeypatch.setattr(map_report.ctypes, "CDLL", Driver)
    load = parse_load(WHOLE)
    answer, memory, place = map_report.encode(load, 4096)
    ((where, dtype, rank, address, shape, strides, box, steps, *modes),) = calls
    assert answer == name and place % 64 == 0 and where.value == place
    first = ctypes.addressof(memory)
    assert first <= place and place + 128 <= first + ctypes.sizeof(memory)
    assert (dtype, rank, address.value) == (9, 3, 4112)
    assert (list(shape), list(strides)) == ([64, 100, 7], [128, 12800])
    assert (list(box), list(steps), modes) == ([32, 16, 2], [1, 1, 1], [0, 2, 2, 1])  # the values in cuda.h
    assert all(type(each)._type_ is ctypes.c_uint64 for each in (shape, strides))
    assert all(type(each)._type_ is ctypes.c_uint32 for each in (box, steps))


@cases(
    "text, says",
    ("", "1 to 256 elements; the box is (1024,)"),
    (f"{GOOD},start=4", "starts 4 past one"),
    ("shape=100x62,box=16x32", "one is 248 bytes"),
    ("shape=1x62,box=1x32", "one is 248 bytes"),
    ("shape=100x64,box=16x3", "3 elements take 12"),
    ("shape=100x64,box=16x64,swizzle=128B", "it takes 256"),
    ("dtype=int32,shape=64,box=32,fill=nan", "fill must be zero for a tensor of integers"),
)
def test_a_broken_rule_of_the_map_is_a_sentence(text, says):
    (sentence,) = parse_load(text).broken_map_rules()
    assert says in sentence and sentence.endswith(".")


def test_a_narrow_box_is_outside_of_the_tool_only_if_its_map_is_legal():
    with pytest.raises(ValueError, match="the map is legal, but outside of this tool"):
        parse_load("dtype=bfloat16,shape=100x64,box=16x16,swizzle=128B")
    (sentence,) = parse_load("dtype=bfloat16,shape=100x64,box=16x12,swizzle=128B").broken_map_rules()
    assert "12 elements take 24" in sentence


def test_every_broken_rule_is_listed():
    load = parse_load("shape=100x62,box=300x64,swizzle=128B,start=4,corner=0x1,extra=-16")
    assert len(load.broken_map_rules()) == 4 and len(load.broken_load_rules("sm_90a")) == 2
    assert not parse_load(GOOD).broken_map_rules() + parse_load(GOOD).broken_load_rules("sm_90a")
    large = parse_load("shape=256x256,box=256x64")
    assert large.broken_load_rules("sm_90a") == []
    (sentence,) = parse_load("shape=256x256,box=256x128").broken_load_rules("sm_120a")
    assert "sm_120a has 101,376" in sentence


@cases(
    "text, says",
    ("shap=3", "each part is FIELD=VALUE with one of dtype, shape"),
    ("shape=3xx4", "shape takes whole numbers"),
    ("start=1x2", "start takes whole numbers"),
    ("dtype=fp4", "this tool takes dtype=uint8|"),
    ("shape=64x64,box=8", "box must have 2 numbers"),
    ("shape=0,box=1", "shape must have 1 to 5 extents from 1"),
    ("shape=64x64,strides=64x2,box=8x8", "the last stride must be 1"),
    ("swizzle=3B", "128B; not '3B'"),
    ("shape=64x64,box=8x4,swizzle=128B", "the swizzle of 128 bytes, and a row of this box takes 16"),
    ("shape=64x64,box=8x8,extra=-999", "the barrier cannot expect -743 bytes"),
    ("shape=1000000x1000,box=8x8", "the reproducer takes up to 1,073,741,824"),
)
def test_a_wrong_load_is_one_line_and_two(capsys, tmp_path, text, says):
    status, out, err = run(capsys, "--report", str(tmp_path / "r.md"), "--load", text)
    assert status == 2 and says in err and len(err.splitlines()) == 1
    assert not out and not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_is_two(capsys, monkeypatch, tmp_path):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(map_report, "write_report", lambda *_: ("text", "verdict", False))
    monkeypatch.setattr(files, "write_atomically", full)
    status, out, err = run(capsys, "--report", str(tmp_path / "r.md"))
    assert status == 2 and "No space left" in err and len(err.splitlines()) == 1 and not out


@pytest.mark.compile
@needs_no_gpu
@cases(
    "load, verdict",
    ("", "This is an error of the program: the map breaks a rule"),
    (f"{GOOD},corner=0x1", "error of the program: the load breaks a rule that only a run shows"),
    (GOOD, "Whether the load fails is not known before a run"),
)
def test_without_a_gpu_the_report_says_what_is_missing(capsys, tmp_path, load, verdict):
    path = tmp_path / "new" / "report.md"
    status, out, err = run(capsys, "--report", str(path), "--load", load)
    text = path.read_text()
    assert status == 0 and not err and verdict in out and verdict in text and "nothing was sent" in out
    first, whose, arguments, *rest = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert (first, whose) == ("Environment", "Whose error is it?") and "cuTensorMapEncodeTiled" in arguments
    assert rest == ["The call that failed", "Expected", "Observed", "Reproducer"]
    assert "not run: the load needs TMA" in text and "| nvcc |" in text and "| boxDim |" in text
    assert "@" not in re.sub(r"@\w", "", text) and "- [ ] The kernel takes the map" in text


@pytest.mark.compile
@cases("text", rarely(""), "shape=3x2x5x6x48,dtype=uint8,box=2x2x2x3x16,corner=1x0x4x-1x32")
def test_the_reproducer_is_whole_and_builds(tmp_path, text):
    source = map_report.make_reproducer(parse_load(text), "sm_90a")
    assert not re.search(r"@\w+@", source) and '#include "' not in source and "-arch=sm_90a" in source
    for target in ("sm_90a", "sm_120a"):
        cuda.compile_cubin(source, target)
    if shutil.which("nvcc"):  # the host's part, too
        (tmp_path / "reproduce.cu").write_text(source)
        command = ["nvcc", "-std=c++17", "-arch=sm_90a", "-c", "reproduce.cu", "-o", "reproduce.o"]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=300)


@pytest.mark.parametrize("corner", [(0, 0), (-3, -4), (90, 48), (200, 0)])
@pytest.mark.parametrize("fill, swizzle", [("zero", "none"), ("nan", "128B")])
def test_wrong_bytes_of_a_box_are_counted(corner, fill, swizzle):
    load = parse_load(f"{GOOD},corner={corner[0]}x{corner[1]},fill={fill},swizzle={swizzle},start=16")
    data = torch.randn(load.tensor_bytes // 4).view(torch.uint8)
    outside = float("nan") if fill == "nan" else 0.0
    wide = torch.nn.functional.pad(data[16:].view(torch.float32).view(100, 64), (200,) * 4, value=outside)
    right = wide[200 + corner[0] :, 200 + corner[1] :][:16, :32]
    found = torch.empty(load.box_bytes, dtype=torch.uint8)
    found[tensor_map.swizzle_offset(torch.arange(load.box_bytes), swizzle)] = right.flatten().view(
        torch.uint8
    )
    assert map_report.count_wrong(load, data, found) == 0
    inside = corner != (200, 0)
    found[0 if corner == (0, 0) else slice(None)] ^= 1
    assert map_report.count_wrong(load, data, found) > 0 or not inside


@cases(
    "text, observed, says, bug",
    (GOOD, "0 of 2048 bytes of the box are wrong", "Nothing fails here", False),
    (GOOD, "7 of 2048 bytes of the box are wrong", "may be a bug", True),
    (GOOD, "cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE", "may be a bug", True),
    (GOOD, "not run: no GPU", "not known before a run", False),
    ("", "cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE", "the driver refuses such a map", False),
    ("", "0 of 4096 bytes of the box are wrong", "did not refuse it as documented", False),
    (f"{GOOD},corner=0x1", ILLEGAL, "only a run shows", False),
)
def test_the_verdict_depends_on_the_rules_and_the_run(monkeypatch, text, observed, says, bug):
    assert map_report.judge(parse_load(text), observed, "sm_90a")[1] == bug
    monkeypatch.setattr(map_report, "observe", lambda text: observed)
    monkeypatch.setattr(map_report.doctor, "check_environment", lambda targets: [])
    monkeypatch.setattr(map_report.cuda, "compile_cubin", lambda *_: b"")
    report, verdict, may_be_bug = map_report.write_report(text, "sm_90a")
    assert says in verdict and may_be_bug == bug and f"`{observed}`" in report
    call, _, error = observed.partition(": ")
    failed = report.partition("## The call that failed\n\n")[2].splitlines()[0]
    if not observed.startswith("not run"):
        assert failed == (f"`{call}`: `{error}`" if error else "No call failed.")


@pytest.mark.gpu
@pytest.mark.fault
@cases(
    "text, observed",
    ("", "cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE"),
    (GOOD, "0 of 2048 bytes of the box are wrong"),
    (
        "dtype=bfloat16,shape=7x100x64,box=2x16x64,swizzle=128B,corner=6x90x8,fill=nan",
        "0 of 4096 bytes of the box are wrong",
    ),
    (f"{GOOD},extra=16", "load_box: the barrier's phase did not end within 2 s"),
    (f"{GOOD},corner=0x1", ILLEGAL),
)
def test_on_this_gpu_the_load_does_what_its_rules_say(text, observed):
    assert map_report.observe(text) == observed
