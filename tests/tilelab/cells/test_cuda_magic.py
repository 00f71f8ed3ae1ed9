"""%%cuda: what a cell's kernels become, what stands below the cell, and which errors a reader sees."""

import pytest
import torch
from cases import cases
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from tilelab.cells import cuda_magic

COPY = """#include "ptx.cuh"
extern "C" __global__ void __launch_bounds__(32) copy_tile(const unsigned char* __restrict__ x, unsigned char* out,
                                                           int tiles) {
    __shared__ __align__(128) unsigned char buffer[BYTES];
    __shared__ __align__(8) u64 full;
    if (threadIdx.x != 0 || blockIdx.x >= tiles) return;
    mbarrier_init(shared_address(&full), 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(shared_address(&full), BYTES);
    bulk_load(shared_address(buffer), x + u64(blockIdx.x) * BYTES, BYTES, shared_address(&full));
    mbarrier_wait(shared_address(&full), 0);
    bulk_store(out + u64(blockIdx.x) * BYTES, shared_address(buffer), BYTES);
    bulk_commit();
    bulk_wait_read<0>();
}
"""
pytestmark = pytest.mark.compile


@pytest.fixture
def shell():
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "tilelab.cells.cuda_magic")
    yield shell
    InteractiveShell.clear_instance()


def run(shell, line, source):
    shell.run_cell_magic("cuda", line, source)


def test_a_cell_binds_its_kernels_and_shows_what_it_asks_for(shell, capsys):
    run(shell, "copy_tile -DBYTES=4096 --ptx 'cp.async.bulk' --sass UBLKCP", COPY)
    kernel, said = shell.user_ns["copy_tile"], capsys.readouterr().out
    assert kernel.parameters == (("unsigned char*", "x"), ("unsigned char*", "out"), ("int", "tiles"))
    assert "4,104 B of static shared memory" in said and "2 UBLKCP" in said
    assert "mbarrier::complete_tx::bytes" in said and "UBLKCP.S.G" in said
    assert kernel.define(BYTES=64).resources()["smem_static"] == 72
    assert kernel.source_hash() not in (kernel.define(BYTES=64).source_hash(), "")


def test_changed_lines_are_counted_as_the_cell_counts_them(shell, capsys):
    run(shell, "-DBYTES=64", COPY)
    more = COPY.replace("copy_tile", "copy_again").replace("(8) u64 full;", "(8) u64 full[2];  // +")
    run(shell, "-DBYTES=64 --changed-from copy_tile", more.replace("&full", "full"))
    assert "are new or changed since copy_tile: 6, 8, 10–12\n" in capsys.readouterr().out


def test_an_error_names_the_line_of_the_cell(shell):
    with pytest.raises(UsageError, match=r'cell\(15\): error: expected a ";"'):
        run(shell, "copy_tile -DBYTES=64", COPY.replace("bulk_commit();", "bulk_commit()"))
    assert "copy_tile" not in shell.user_ns or shell.user_ns.pop("copy_tile")


@cases(
    "line, source, reason",
    ("", "int x;", "declares no kernel; write extern"),
    ("other -DBYTES=64", COPY, "no kernel 'other'; it declares copy_tile"),
    ("--changed-from nothing -DBYTES=64", COPY, "'nothing' is not a kernel of a cell above"),
    ("--fast", COPY, "unrecognized arguments: --fast"),
)
def test_bad_use_is_one_sentence(shell, line, source, reason):
    with pytest.raises(UsageError, match=reason) as refused:
        run(shell, line, source)
    assert "\n" not in str(refused.value)


def test_arguments_must_fit_the_signature():
    kernel = cuda_magic.find_kernels(COPY, ["-DBYTES=64"])["copy_tile"]
    x = torch.zeros(64, dtype=torch.uint8)
    assert [type(value).__name__ for value in kernel._convert([x, x, 3])] == ["Tensor", "Tensor", "c_int"]
    for args, reason in (
        ((x, x), "takes 3 arguments .x, out, tiles.; 2 were given"),
        ((x, 1, 3), "out of copy_tile is a pointer; pass a tensor"),
        ((x, x, 2**31), "tiles of copy_tile is 2147483648, which does not fit its type int"),
    ):
        with pytest.raises(ValueError, match=reason):
            kernel._convert(args)
    with pytest.raises(ValueError, match=r"launch copy_tile as copy_tile\[grid, block\]"):
        kernel[1]


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_launch_copies(where):
    kernel = cuda_magic.find_kernels(COPY, ["-DBYTES=4096"])["copy_tile"]
    x = torch.randint(0, 255, (8, 4096), dtype=torch.uint8, device=where)
    out = torch.zeros_like(x)
    kernel[8, 32](x, out, 7)
    assert torch.equal(out[:7], x[:7]) and not out[7].any()
