"""The kernels of tile_pipeline.cu, as the compiler makes them: resources, and the instructions that they teach."""

import dataclasses
import itertools
import re

import pytest

from ch10 import tile_pipeline
from ch10.tile_pipeline.configs import TileConfig, configs
from ch10.tile_pipeline.lesson import box_dump, experiments
from tilelab.runtime import build, tensor_map

pytestmark = pytest.mark.compile

# The first and the last configuration of each operation; those between differ in numbers alone.
ENDS = [(op, name) for op in experiments.OPS for name in [*configs(op)][:: len(configs(op)) - 1]]
BEST = [(op, next(iter(configs(op)))) for op in experiments.OPS]
# The first and the last ring, each producer, each swizzle and each block, and the largest tile of a transpose.
OTHERS = [
    TileConfig(op, 4, 64, stages=stages, tiles_per_cta=7) for op, stages in (("copy", 1), ("accumulate", 6))
]
OTHERS += [
    TileConfig("stencil", 8, 32, 64, stages, 7, producer) for stages, producer in ((1, "thread"), (6, "warp"))
]
OTHERS += [
    TileConfig("transpose", 96, 96, 96, swizzle=swizzle, block=block, raster=3)
    for swizzle, block in zip(tensor_map.SWIZZLES, itertools.cycle((1, 4)))
]
OTHERS += [TileConfig("transpose", 128, 128, 128, block=4), TileConfig("add_shared", 8, 64, 64, cluster=4)]


@pytest.fixture(scope="module")
def built():
    """Return reports by (op, variant, target), by the text of OTHERS, by the copy's element size, and by "dump"."""
    jobs = {(op, name, "sm_90a"): tile_pipeline.job(configs(op)[name], "sm_90a") for op, name in ENDS}
    later = itertools.cycle(("sm_100a", "sm_120a"))
    jobs |= {
        (op, name, target): tile_pipeline.job(configs(op)[name], target)
        for (op, name), target in zip(BEST, later)
    }
    jobs |= {str(config): tile_pipeline.job(config, "sm_90a") for config in OTHERS}
    jobs |= {size: tile_pipeline.job(configs("copy")["ring"], "sm_90a", size) for size in (1, 8)}
    return build_all(jobs | {"dump": box_dump.dump_job((24, 32), 4, "sm_90a")})


def build_all(jobs):
    reports = {
        report.job.name: report
        for report in build.build(dataclasses.replace(job, name=str(key)) for key, job in jobs.items())
    }
    return {key: reports[str(key)] for key in jobs}


@pytest.mark.trouble
def test_the_other_variants_hold_what_they_teach():
    rest = [(op, name) for op in experiments.OPS for name in configs(op) if (op, name) not in ENDS]
    jobs = {(op, name, "sm_90a"): tile_pipeline.job(configs(op)[name], "sm_90a") for op, name in rest}
    test_every_variant_holds_what_it_teaches(build_all(jobs))


def test_every_variant_holds_what_it_teaches(built):
    for (op, name, target), report in (
        (key, report) for key, report in built.items() if isinstance(key, tuple)
    ):
        config, counts = configs(op)[name], report.counts
        assert report.launchable and report.threads == config.block_threads, report.reason
        assert report.smem == config.smem_bytes()
        if not target.startswith("sm_12"):  # there a load into shared memory of a cluster may call a function
            assert report.spills == 0, report.job
        assert counts["UTMALDG"] and counts["SYNCS"] and not counts["LDG"], report.job
        assert not counts["LDGSTS"], report.job
        assert (counts["UTMASTG"] > 0) == (op in ("copy", "transpose", "add_shared"))
        assert (counts["UTMAREDG"] > 0) == (op == "accumulate")
        assert (counts["STG"] > 0) == (op == "stencil")
        assert (counts["STS"] > 0) == (op in ("transpose", "add_shared"))
        if target == "sm_90a":
            assert (counts["LDS"] > 0) == (op in ("stencil", "transpose", "add_shared"))


def test_every_ring_swizzle_cluster_and_element_size_compiles(built):
    for config in OTHERS:
        assert built[str(config)].launchable and built[str(config)].spills == 0, built[str(config)].reason
    for size in (1, 8):
        assert built[size].launchable and built[size].smem == 4 * 8 * 256 * size
    assert built["dump"].launchable and built["dump"].counts["UTMALDG"] == 1


def test_only_a_cluster_multicasts_and_waits_for_its_neighbours(built):
    for op, name in (end for end in ENDS if end[0] == "add_shared"):
        config, sass = configs(op)[name], built[op, name, "sm_90a"].sass
        assert bool(re.search(r"UTMALDG\.2D\.MULTICAST", sass)) == (config.cluster > 1)
        assert ("UCGABAR_ARV" in sass) == (config.cluster > 1)
        assert "UTMALDG.3D" in sass and "UTMASTG.3D" in sass


def test_a_transpose_in_blocks_moves_16_bytes_at_a_time(built):
    for config in [config for config in OTHERS if config.op == "transpose"][:2]:
        sass = built[str(config)].sass
        assert bool(re.search(r"LDS\.128", sass)) == bool(re.search(r"STS\.128", sass)) == (config.block == 4)
