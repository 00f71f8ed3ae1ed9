"""The recorded builds: whole, of today's kernels, and what the installed Triton builds still."""

import collections

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Builds, environments, experiments, kernels
from ch14.bug_hunt.hunts import FORMATS
from tilelab import check, device, results

INSTALLED = environments.installed_version()
rows = {name: experiments.load_record(name).rows for name in experiments.EXPERIMENTS}


@pytest.mark.parametrize("name", rows)
def test_a_record_is_whole_and_of_todays_kernels(name):
    record = experiments.load_record(name)
    assert not record.stale and record.label().startswith("recorded without a GPU, 2")
    assert results.gpu_folder(record.data) == "no-gpu"
    wanted = [experiments.row_key({"triton": version, "target": target, "hunt": hunt, **config})
              for version, target, hunt, config in experiments.EXPERIMENTS[name]()]
    assert [experiments.row_key(row) for row in record.rows] == wanted


def test_the_matrix_has_every_triton_and_target():
    cells = collections.Counter((row["triton"], row["target"]) for row in rows["matrix"])
    assert {"3.5.1", "3.6.0", "3.7.1", "3.9.0"} <= {version for version, _ in cells}
    assert {target for _, target in cells} == set(device.TARGETS[1:])
    assert set(cells.values()) == {21} and len(cells) == 6 * 5


def test_failures_name_their_stage():
    for row in (row for each in rows.values() for row in each if row["outcome"] == "fails"):
        assert row["status"] == "failed" and row["stage"] and row["message"] and "/tmp" not in row["message"], row


def test_descriptors_move_by_tma_pointers_do_not():
    for row in rows["matrix"] + rows["loop"] + rows["warp_specialize"]:
        if row["outcome"] != "fails" and "LOADS" in row:
            assert (row.get("tma", 0) > 0) == (row["LOADS"] != "pointers"), row


def test_tensor_memory_is_for_four_or_eight_warps():
    for row in rows["loop"]:
        if row["outcome"] == "builds":
            assert ("tcgen05" in row, "mma_sync" in row) == (row["num_warps"] in (4, 8), row["num_warps"] in (2, 16))


def test_the_bisected_rule_holds_in_every_build():
    found = bug_hunt.find(Builds(HUNTS["loop"], "3.5.1", "sm_100a", rows["loop"]))
    assert all(found.predicts(row) == (row["outcome"] == "fails") for row in rows["loop"])
    assert found.harmless["BLOCK_K"] == found.harmless["LOADS"] == [] and len(found.builds.rows) < len(rows["loop"]) / 9


def test_the_installed_tritons_row_is_built_as_recorded():
    """All its cells, from an empty cache."""
    if INSTALLED not in experiments.VERSIONS:
        pytest.fail(f"Triton {INSTALLED} is not recorded: TILES_RECORD=1 python -m ch14.bug_hunt --matrix")
    built = experiments.build_now("matrix", INSTALLED)
    assert len(built) == 105 and experiments.list_differences("matrix", built) == []


def test_a_difference_is_told():
    row = next(row for row in rows["matrix"] if row["outcome"] == "builds")
    told, = experiments.list_differences("matrix", [row | {"outcome": "fails"}])
    assert told.endswith("outcome was 'builds', is 'fails'") and told.startswith("loop, 3.5.0, sm_90a, plain")
    assert experiments.list_differences("matrix", [row | {"triton": "1.0.0"}])[0].endswith(": not recorded")


def test_every_form_computes_the_same():
    found = experiments.check_correctness()
    assert len(found) == 6 * 3 + 4 * 3 and [row for row in found if row["status"] != "ok"] == []


def scales(rows, columns):
    """Exponents from 2^-2 to 2^2 as e8m0, and what they stand for."""
    exponents = torch.randint(-2, 3, (rows, columns), device="cuda")
    return (exponents + 127).to(torch.uint8), torch.exp2(exponents.double())


def test_it_fails_up_to_3_8_as_the_readme_says():
    alive = {row["triton"] for row in rows["matrix"] if row["hunt"] == "loop" and row["target"] == "sm_100a"
             and row["LOOP"] == "carry b" and row["LOADS"] == "device" and row["outcome"] == "fails"}
    assert {"3.6.0", "3.7.1"} <= alive and "3.9.0" not in alive


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_block_scaled_products_on_the_gpu(name):
    m, n, k = 256, 128, 256
    packed, group, kind, *_ = FORMATS[name]
    (a_scale, a_factor), (b_scale, b_factor) = scales(m, k // group), scales(n, k // group)
    if name == "mxfp8":
        a, b = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((m, k), (k, n)))
        a_value, b_value = a.double(), b.double()
    else:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda", dtype=torch.float64)
        values = torch.cat([values, -values])
        codes = [torch.randint(0, 16, shape, device="cuda", dtype=torch.uint8) for shape in ((m, k), (k, n))]
        a, b = codes[0][:, ::2] | codes[0][:, 1::2] << 4, codes[1][::2] | codes[1][1::2] << 4  # low nibble first
        a_value, b_value = (values[code.long()] for code in codes)
    expected = (a_value * a_factor.repeat_interleave(group, 1)) @ (b_value * b_factor.repeat_interleave(group, 1).T)
    out = torch.full((m, n), float("nan"), device="cuda")
    kernels.scaled_kernel[(m // 128, n // 128)](
        a.contiguous(), a_scale, b.contiguous(), b_scale, out, m, n, k, BLOCK_M=128, BLOCK_N=128, BLOCK_K=128,
        PACKED=packed, GROUP=group, FORMAT=kind, num_warps=4, num_stages=2)
    assert check.relative_error(out, expected) < 2**-7  # bf16 has room for both formats' digits


@pytest.mark.gpu
@pytest.mark.parametrize("loads, warps", [("device", 4), ("host", 4), ("device", 8)])
def test_specialised_warps_on_the_gpu(loads, warps):
    if not device.current().has_wgmma:
        pytest.skip("the hunt's kernel is Hopper's")
    m, n, k = 256, 256, 512
    a, b = (torch.randn(shape, device="cuda").half() for shape in ((m, k), (k, n)))
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)
    matrices, tiles = (a, b, out), ([64, 64], [64, 128], [64, 128])
    if loads == "host":
        matrices = [TensorDescriptor.from_tensor(each, tile) for each, tile in zip(matrices, tiles)]
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    compiled = kernels.specialized_kernel[(m // 64, n // 128)](
        *matrices, m, n, k, BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, LOADS=loads, LOOP="over K", WARP_SPECIALIZE=True,
        num_warps=warps, num_stages=3)
    assert check.relative_error(out, a.double() @ b.double()) < check.TOLERANCE[torch.float16]
    assert (f".reqntid {384 if warps == 4 else 256}" in compiled.asm["ptx"])
