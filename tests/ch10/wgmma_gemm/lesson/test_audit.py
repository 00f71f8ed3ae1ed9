"""What the profiler counts for aligned and unaligned rows, and how its answer becomes rows."""

from ch10.wgmma_gemm.lesson import audit
from tilelab.measure import profiler
from tilelab.runtime import device

HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")


def test_the_two_shapes_differ_only_in_where_rows_begin():
    (m, n, k), (same_m, same_n, longer) = audit.SHAPES
    assert (m, n) == (same_m, same_n) and 2 * k % 128 == 0 and 2 * longer % 128 == 16 and longer - k < 64


def test_rows_have_sectors_per_request(monkeypatch):
    names = ['"ID"', '"Kernel Name"', *(f'"{metric}"' for metric in audit.METRICS.values())]
    line = ",".join(['"0"', '"specialised"', '"2,000"', '"8,000"', '"80.5"', '"46000"'])
    monkeypatch.setattr(
        profiler,
        "run_ncu",
        lambda options, command: "\n".join(
            ["==PROF== Connected", ",".join(names), '""', *[line] * len(audit.find_cases())]
        ),
    )
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(device, "current", lambda: HOPPER)
    rows = audit.count_lines().rows
    found = [(row["name"], row["row_bytes"]) for row in rows]
    assert found == [("cuBLAS", 8192), ("WGMMA", 8192), ("cuBLAS", 8208), ("WGMMA", 8208)]
    assert rows[0]["sectors_per_request"] == 4 and rows[0]["us"] == 46 and rows[0]["tensor_percent"] == 80.5
