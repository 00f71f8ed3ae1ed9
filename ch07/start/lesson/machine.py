"""Support `notebooks/00_start.ipynb`: the machine in figures that have a record.

Read `Machine` first; `figures` draws it, `exercises` checks the kernels that a reader writes.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass

from tilelab.measure import bench
from tilelab.records import results
from tilelab.runtime import device

BF16_BYTES = 2
TILE = re.compile(r"(\d+) ?× ?(\d+)[×,]")  # of C, in the name of a configuration


@dataclass(frozen=True)
class Machine:
    """A GPU in figures. None stands for a figure that has no record.

    `copy_tbps` is the traffic of a copy (bytes read plus bytes written) and `tflops` the library's best bf16 product;
    `label` is their origin. The other measured figures come from chapter 10, and `gemm_label` is their origin. L2 has
    delivered `l2_tbps` to all SMs in a GEMM, so it can do at least as much. `load_cycles` and
    `product_cycles` are medians of the GEMM with one buffer, the wait for the 32 KiB of a K step and their product.
    `peak_tbps` and `peak_tflops` stand in the datasheet.
    """

    name: str
    target: str
    sms: int
    memory_gib: float
    l2_mib: float
    smem_kib: float
    copy_tbps: float
    tflops: float
    peak_tbps: float | None
    peak_tflops: float | None
    l2_tbps: float | None
    load_cycles: float | None
    product_cycles: float | None
    label: str
    gemm_label: str = ""

    @property
    def gflops_per_sm(self) -> float:
        """Billions of bf16 operations per second that the tensor core of one SM did."""
        return self.tflops * 1e3 / self.sms

    def per_sm(self, tbps: float) -> float:
        """Return the share of one SM, in GB/s."""
        return tbps * 1e3 / self.sms


def bytes_per_operation(rows: int, columns: int, element_bytes: float = BF16_BYTES) -> float:
    """Return the bytes that a tile of C must receive per operation: rows + columns elements per 2 rows columns."""
    return element_bytes * (rows + columns) / (2 * rows * columns)


def find_rows(experiment: str, gpu: str | None = None, **wanted) -> list[dict]:
    """Return the recorded rows of an experiment with these values; none without a record."""
    try:
        rows = results.load(experiment, gpu)["rows"]
    except FileNotFoundError:
        return []
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def describe_machine() -> Machine:
    """Return the figures of this GPU, or the recorded ones of the H200 where there is none."""
    roofs = bench.measured_roofs()
    here, gpu = roofs.device, results.gpu_folder(roofs.data)
    sheet = device.known_gpu(here["name"])

    # A cluster shares what L2 delivers.
    rows = find_rows("ch10_gemm_sweep", gpu, status="ok")
    tiles = [(row["tflops"], TILE.search(row["config"])) for row in rows if "cluster" not in row["config"]]
    delivered = (tflops * bytes_per_operation(*map(int, tile.groups())) for tflops, tile in tiles if tile)

    def median(event: str) -> float | None:
        rows = find_rows("ch10_gemm_timeline", gpu, name="tile", event=event)
        cycles = [row["end"] - row["begin"] for row in rows if row["step"] > 0]
        return statistics.median(cycles) if cycles else None

    peak_tbps = sheet and sheet.peak_gbps and sheet.peak_gbps / 1e3
    return Machine(
        *(here["name"].removeprefix("NVIDIA "), here["target"], here["sms"]),
        *(here["memory_bytes"] / 2**30, here["l2_bytes"] / 2**20, here["smem_per_block"] / 1024),
        *(roofs.rows[0]["gbps"] / 1e3, roofs.rows[1]["tflops"], peak_tbps, sheet and sheet.bf16_tflops),
        *(max(delivered, default=None), median("wait"), median("product")),
        *(roofs.label(), _gemm_label(gpu)),
    )


def _gemm_label(gpu: str) -> str:
    dates = set()
    for experiment in ("ch10_gemm_sweep", "ch10_gemm_timeline"):
        try:
            dates.add(results.load(experiment, gpu)["recorded"][:10])
        except FileNotFoundError:
            continue
    return f"chapter 10's GEMM, {'since ' * (len(dates) > 1)}{min(dates)}" if dates else ""
