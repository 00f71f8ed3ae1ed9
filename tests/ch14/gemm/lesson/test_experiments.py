"""The GEMM's experiments: what they build, and that a launch finds it."""

import pytest

from ch14.gemm.configs import GemmConfig, configs, parse
from ch14.gemm.lesson import experiments
from ch14.gemm.lesson.sweep import GemmSpace
from tilelab.runtime import build, device


def test_a_build_is_what_a_launch_at_that_shape_asks_for():
    """Triton makes other plain kernels of sizes that are one, or no multiple of 16; the sweep builds the right one."""
    persistent, plain = parse("128,256,64,8,4"), GemmConfig(64, 64, 32, 4, 1)
    even, odd, one = (
        GemmSpace((m, n, 4096)).job(persistent) for m, n in ((4096, 4096), (1000, 1000), (1, 4096))
    )
    assert even == odd == one and even.aligned == ()
    one = GemmSpace((1, 4096, 4096)).job(plain)
    assert one.constants["M"] == 1 and "M" not in one.signature
    strided = GemmSpace((4096, 1000, 4096), layout="n").job(plain)
    assert {"stride_a", "M", "K"} <= set(strided.aligned)
    assert not {"stride_b", "stride_c", "N"} & set(strided.aligned)
    scaled = GemmSpace((2048, 2048, 2048), "fp8").job(next(iter(configs("course", "fp8").values())))
    assert scaled.signature["scale_a_ptr"] == "*fp32"


@pytest.mark.gpu
def test_what_was_built_is_what_runs(tmp_path, monkeypatch):
    """The worker on the GPU finds every build in the compiler's cache: nothing is compiled twice."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for shape, dtype, layout in (
        ((1024, 1024, 1024), "bf16", "k"),
        ((1000, 1000, 1000), "bf16", "n"),
        ((1, 2048, 2048), "bf16", "k"),
        ((1024, 1024, 1024), "fp8", "k"),
    ):
        for config in (
            next(iter(configs("course", dtype, device.current().target).values())),
            GemmConfig(64, 64, 32, 4, 1),
        ):
            case = config, *shape, dtype, layout
            experiments.compile_ahead([case])
            before = len(list(tmp_path.glob("*/*.cubin")))
            assert before and experiments.verify(*case)["status"] == "ok"
            assert len(list(tmp_path.glob("*/*.cubin"))) == before, case


def test_each_build_is_made_once_and_before_the_first_is_timed(monkeypatch):
    happened = []
    here = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30)
    monkeypatch.setattr(device, "current", lambda: here)
    monkeypatch.setattr(
        build, "compile_ahead", lambda jobs: happened.append(sorted(job.kernel for job in jobs))
    )
    monkeypatch.setattr(
        experiments, "measure", lambda config, *case: happened.append(case) or {"status": "ok"}
    )
    sides = (1024, 2048, 1000)
    rows = experiments.measure_best((side, side, side, "bf16", "n") for side in (*sides, 2048))
    assert [row["shape"][0] for row in rows] == [*sides, 2048]
    assert all(row["predicted_ms"] > 0 for row in rows)
    built, *timed = happened
    assert len(timed) == 4 and 2 <= len(built) < 4
    assert set(built) == {"ch14.gemm.kernels:gemm_persistent_kernel"}
