"""The kernels of wgmma_gemm.cu, as the compiler makes them: resources, and the instructions that they teach."""

import contextlib
import dataclasses
import re

import pytest

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import STEPS
from ch10.wgmma_gemm.lesson import experiments
from tilelab.measure.patch import patched_source
from tilelab.runtime import build

pytestmark = pytest.mark.compile

# One name for each set of macros: the steps cluster, persistent and pdl, for example, are one binary.
EVERY = {
    tuple(config.constants().items()): (name, config)
    for name, config in experiments.one_of_each_kind().items()
}
EVERY = dict(EVERY.values())
OTHERS = [name for name in EVERY if name not in STEPS]
SAMPLE = [*(name for name in EVERY if name in STEPS), *OTHERS[::8]]
FAULTS = experiments.fault_patches()


@pytest.fixture(scope="module")
def built():
    """Return reports for sm_90a by name and by (fault, name), and one for sm_100a."""
    jobs = {name: wgmma_gemm.job(EVERY[name]) for name in SAMPLE}
    jobs["sm_100a"] = wgmma_gemm.job(STEPS["raster"], "sm_100a")
    with contextlib.ExitStack() as stack:
        for fault, patch in FAULTS.items():
            patched = stack.enter_context(patched_source(wgmma_gemm.SOURCE, *patch))
            jobs["fault", fault] = wgmma_gemm.job(experiments.BROKEN_CONFIG, source=patched)
        return build_all(jobs)


def build_all(jobs):
    named = (dataclasses.replace(job, name=str(key)) for key, job in jobs.items())
    reports = {report.job.name: report for report in build.build(named)}
    return {key: reports[str(key)] for key in jobs}


def check_configurations(names, reports):
    for name in names:
        report, config = reports[name], EVERY[name]
        assert report.launchable and report.spills == 0, (name, report.reason)
        assert report.threads == config.threads
        counts = report.counts
        assert counts["HGMMA"] == 4 * config.boxes_per_stage * config.block_m // config.consumers // 64
        assert counts["UTMALDG"] and counts["SYNCS"] and bool(counts["UTMASTG"]) == (config.kernel != "split")
        assert not re.search(r"\bHMMA|\bLDGSTS", report.sass)


def test_every_step_and_a_sample_of_the_configurations_hold_what_they_teach(built):
    check_configurations(SAMPLE, built)


@pytest.mark.trouble
def test_the_other_configurations_hold_what_they_teach():
    rest = [name for name in OTHERS if name not in SAMPLE]
    check_configurations(rest, build_all({name: wgmma_gemm.job(EVERY[name]) for name in rest}))


def test_the_products_of_a_step_follow_each_other_without_a_wait(built):
    lines = [
        line
        for line in built["tile_128x256"].sass.splitlines()
        if "HGMMA" in line or "WARPGROUP.DEPBAR" in line
    ]
    first = next(index for index, line in enumerate(lines) if "HGMMA" in line)
    assert all("HGMMA" in line for line in lines[first : first + 4]) and "DEPBAR" in lines[first + 4]


def test_registers_are_handed_over(built):
    for name in ("warp_specialized", "tile_128x256"):
        assert re.search("USETMAXREG.DEALLOC", built[name].sass), name
        assert re.search("USETMAXREG.TRY_ALLOC", built[name].sass), name
    assert "USETMAXREG" not in built["ring"].sass


def test_a_cluster_needs_no_fence_of_the_whole_gpu_at_each_step(built):
    body = built["pdl"].sass
    loop = body[body.index("HGMMA") : body.rindex("HGMMA")]
    assert "MEMBAR" not in loop and "UTMALDG.2D.MULTICAST" in body


def test_no_other_target_has_wgmma(built):
    report = built["sm_100a"]
    assert report.status == "failed"
    assert re.search(r"not supported on \.target 'sm_100a'|does not compile for sm_100a", report.reason)


def test_each_fault_compiles_to_another_kernel(built):
    whole = built["fault", "nothing"].sass
    for fault in FAULTS:
        report = built["fault", fault]
        assert report.launchable and report.spills == 0, fault
        assert (report.sass == whole) == (fault == "nothing"), fault
