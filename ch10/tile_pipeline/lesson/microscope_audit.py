"""Whether the microscope's rules and costs are right: maps that the driver judges, and reads that the profiler counts.

`python -m ch10.tile_pipeline.lesson.microscope_audit` is what the profiler watches. The random maps and reads are the
same in every run, and the tests of the view in JavaScript take them, too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import random
import sys
from collections.abc import Callable

import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline.lesson import banks, explorer, map_report
from ch10.tile_pipeline.lesson.map_report import DTYPES, TiledMap
from tilelab.measure import profiler
from tilelab.records import results
from tilelab.runtime import cuda, device, provenance, tensor_map

SOURCE = pathlib.Path(__file__).with_name("microscope_audit.cu")
MAPS, READS = 500, 60
REPEATS = 1000  # reads per launch, so that a few other accesses change nothing
WAVEFRONTS = {
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "all_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
}
KINDS = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}  # {bytes per lane: the kernel's KIND}; a matrix is 5
LANES, NO_LANE = 32, 0xFFFFFFFF
SMALLEST_SMEM = 99 << 10  # bytes that a block has on every GPU with TMA


# ---- maps


def make_random_map(source: random.Random) -> TiledMap:
    """Return a map of 1 to 5 dimensions that keeps every rule, or breaks one or two rules."""
    dtype, rank = source.choice(list(DTYPES)), source.randint(1, 5)
    itemsize, unit = DTYPES[dtype].itemsize, max(1, 16 // DTYPES[dtype].itemsize)
    swizzle = source.choice(list(tensor_map.SWIZZLES))
    widest = min(256, (tensor_map.SWIZZLES[swizzle] or 1 << 20) // itemsize)
    box = [unit * source.randint(1, widest // unit)]
    for _ in range(rank - 1):
        room = max(1, SMALLEST_SMEM // itemsize // torch.Size(box).numel())
        box.insert(0, source.randint(1, min(256, room, source.choice((4, 16, 256)))))
    shape = [source.choice((1, source.randint(1, 40), source.randint(1, 5000))) for _ in range(rank)]
    strides = [1]
    for extent in shape[:0:-1]:  # the innermost first: dense but for rows of whole units, or with padding
        strides.insert(
            0, -(-strides[0] * extent // unit) * unit + unit * source.choice((0, 0, source.randint(1, 9)))
        )
    fields = {
        "fill": "nan" if DTYPES[dtype].is_floating_point and source.random() < 0.3 else "zero",
        "start": 0,
        "swizzle": swizzle,
        "l2_promotion": source.choice(tensor_map.PROMOTIONS),
    }
    for _ in range(source.choice((0, 0, 1, 1, 2))):
        where = source.randrange(rank)
        match source.choice(
            ("fill", "start", "swizzle", "extent", "box", "wide", "inner", "stride", "large")
        ):
            case "fill":
                fields["fill"] = "nan"
            case "start":
                fields["start"] = source.choice((1, 4, 8, 12, 16, 64))
            case "swizzle":
                fields["swizzle"] = source.choice(list(tensor_map.SWIZZLES))
            case "extent":
                shape[where] = source.choice((1 << 32, (1 << 32) + 1, 1 << 20))
            case "box":
                box[where] = source.choice((0, 1, 257, 300))
            case "wide":
                box[-1] = unit * source.randint(1, 256 // unit)
            case "inner":
                box[-1] = source.randint(1, 256)
            case "stride" if rank > 1:
                strides[source.randrange(rank - 1)] += source.choice((1, unit // 2 or 1, unit))
            case "large" if rank > 1:
                strides[0] = source.choice(((1 << 40) // itemsize, (1 << 40) // itemsize - unit))
    return TiledMap(dtype, tuple(shape), tuple(strides), tuple(box), **fields)


def make_random_maps(count: int = MAPS) -> list[TiledMap]:
    """Return `count` random maps, the same in each run. No box comes near the size of shared memory from below."""
    source, maps = random.Random(26), []
    while len(maps) < count:
        made = make_random_map(source)
        # Of these sizes a GPU's limit decides, which is no rule of maps.
        if not SMALLEST_SMEM < made.box_bytes <= 256 << 10:
            maps.append(made)
    return maps


def judge_maps(maps: list[TiledMap], address: int) -> list[dict]:
    """Return a row per map: the sentences of the course's rules, the driver's answer, and whether the two agree.

    The driver also refuses a box that is larger than the shared memory of a block, which the course counts among the
    rules of the load.
    """
    here, rows = device.current(), []
    for number, made in enumerate(maps):
        broken, answer = made.broken_map_rules(), map_report.encode(made, address)[0]
        too_large = made.box_bytes > here.smem_per_block
        agrees = (answer == "CUDA_SUCCESS") == (not broken and not too_large)
        row = {"name": f"map {number}", **dataclasses.asdict(made), "rules": broken, "too_large": too_large}
        row |= {"driver": answer, "agrees": agrees}
        reason = "" if agrees else f"the driver says {answer}, and {len(broken)} rules are broken"
        rows.append(row | {"status": "ok" if agrees else "wrong", "reason": reason})
    return rows


@results.experiment(
    "ch10_microscope_maps",
    lambda: provenance.source_hash(
        make_random_map, make_random_maps, judge_maps, map_report.TiledMap, map_report.encode, tensor_map
    ),
)
def compare_maps() -> list[dict]:
    """Compare the driver's answer with the course's rules for 500 random maps."""
    cuda.current_device()
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    return judge_maps(make_random_maps(), memory.data_ptr())


# ---- reads


@dataclasses.dataclass(frozen=True)
class Read:
    """One read of a warp from a box. `box` and `first` are (rows, columns) in elements of `itemsize` bytes."""

    itemsize: int
    box: tuple[int, int]
    swizzle: str
    access: str
    lane_bytes: int
    first: tuple[int, int]

    @property
    def layout(self) -> tuple[int, int, int, str]:
        return *self.box, self.itemsize, self.swizzle

    @property
    def size(self) -> int:
        """The bytes that each lane reads."""
        return self._read()[1] * self.itemsize

    def lanes(self) -> list[tuple[int, int]]:
        """Return the element (row, column) at which each lane starts to read."""
        return self._read()[0]

    def _read(self) -> tuple[list[tuple[int, int]], int]:
        return explorer.elements_read(*self.box, self.itemsize, self.access, self.lane_bytes, self.first)

    def addresses(self) -> list[int]:
        """Return the address at which each lane reads, from the start of the box."""
        places = explorer.addresses(*self.layout)
        return [int(places[lane]) for lane in self.lanes()]

    def wavefronts(self) -> int:
        """Return how many wavefronts the microscope counts."""
        return explorer.wavefronts(*self.layout, self.access, self.lane_bytes, self.first)

    def __str__(self) -> str:
        return (
            f"{self.access} of {len(self.lanes())} × {self.size} B at {self.first}, box {self.box[0]} × "
            f"{self.box[1]} × {self.itemsize} B, swizzle {self.swizzle}"
        )


def make_random_read(source: random.Random) -> Read:
    """Return a read of at least four lanes."""
    itemsize, swizzle = source.choice((1, 2, 4, 8)), source.choice(list(tensor_map.SWIZZLES))
    unit, width = max(1, 16 // itemsize), tensor_map.SWIZZLES[swizzle] or source.choice((128, 128, 256, 512))
    # Most boxes are as wide as their swizzle, or whole lines of 128 bytes. In the others, rows may leave gaps.
    widest = min(256, width // itemsize)
    columns = widest if source.random() < 0.7 else unit * source.randint(1, widest // unit)
    rows = source.choice((8, 16, 32, 32, 64, 128))
    access = source.choice(("row", "column", "column", "column", "matrix"))
    lane_bytes = source.choice([0, *(size for size in (4, 8, 16) if size >= itemsize)])
    count = explorer.elements_read(rows, columns, itemsize, access, lane_bytes)[1]
    first = source.choice((0, 0, source.randrange(rows))), source.randrange(columns // count) * count
    read = Read(itemsize, (rows, columns), swizzle, access, lane_bytes, first)
    return read if len(read.lanes()) >= 4 else make_random_read(source)


def make_random_reads(count: int = READS, seed: int = 26) -> list[Read]:
    """Return `count` random reads, the same in each run."""
    source = random.Random(seed)
    return [make_random_read(source) for _ in range(count)]


def prepare_read(read: Read) -> tuple[Callable[..., None], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a function that loads the box by TMA and lets a warp read from it, and the tensors of what it found.

    The tensors are: a 32-bit word of each lane's first read, and whether the box has landed.
    """
    (rows, columns), dtype = read.box, tile_pipeline.BITS[read.itemsize]
    x = torch.randint(0, 256, (rows, columns * read.itemsize), dtype=torch.uint8, device="cuda").view(dtype)
    places = read.addresses()
    # ldmatrix takes eight rows. Where the box has fewer, the last row is named again, which costs nothing.
    rest = places[-1] if read.access == "matrix" else NO_LANE
    offsets = torch.tensor(places + [rest] * (LANES - len(places)), dtype=torch.int64).to(torch.uint32).cuda()
    found, landed = (torch.zeros(LANES, dtype=torch.int32, device="cuda") for _ in range(2))
    kind = 5 if read.access == "matrix" else KINDS[read.size]
    smem_bytes = rows * max(columns * read.itemsize, tensor_map.SWIZZLES[read.swizzle]) + 1024
    made = tensor_map.make_tensor_map(x, read.box, swizzle=read.swizzle)
    arguments = [
        made,
        offsets,
        found,
        landed,
        ctypes.c_uint32(rows * columns * read.itemsize),
        ctypes.c_int(kind),
        ctypes.c_int(REPEATS),
        ctypes.c_uint32(0),
    ]
    kernel = cuda.load_kernel(SOURCE, "read_box")

    def launch(keep_alive=x) -> None:
        cuda.launch(kernel, 1, LANES, arguments, smem_bytes)

    return launch, x, found, landed


def expected_words(read: Read, x: torch.Tensor) -> torch.Tensor:
    """Return the word that each lane must find, int32: its first four bytes, or as many as it reads.

    ldmatrix gives lane i the word i % 4 of the row that lane i // 4 points at.
    """
    data, words = x.contiguous().view(torch.uint8).cpu(), []
    lanes = [(row, column * read.itemsize) for row, column in read.lanes()]
    if read.access == "matrix":
        lanes = [(lanes[lane // 4][0], lanes[lane // 4][1] + lane % 4 * 4) for lane in range(4 * len(lanes))]
    for row, byte in lanes:
        words.append(int.from_bytes(bytes(data[row, byte : byte + min(read.size, 4)].tolist()), "little"))
    return torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def check_read(read: Read) -> str:
    """Return "" if each lane finds the element that the microscope shows for it, else a sentence."""
    launch, x, found, landed = prepare_read(read)
    launch()
    torch.cuda.synchronize()
    if not int(landed[0]):
        return "the barrier's phase did not end in time"
    expected = expected_words(read, x)
    wrong = int((found.cpu()[: len(expected)] != expected).sum())
    return f"{wrong} of {len(expected)} lanes read other bytes" if wrong else ""


def _source() -> str:
    own = (SOURCE, make_random_read, make_random_reads, Read, prepare_read, expected_words, check_read)
    beside = (explorer.addresses, explorer.elements_read, explorer.wavefronts, banks, tensor_map)
    return provenance.source_hash(*own, *beside)


@profiler.experiment("ch10_microscope_wavefronts", _source)
def count_reads() -> list[dict]:
    """Count the wavefronts of 60 reads in the profiler, and compare them with the microscope's."""
    reads = make_random_reads()
    counted = profiler.profile_launches(
        [sys.executable, "-m", "ch10.tile_pipeline.lesson.microscope_audit"],
        list(map(str, reads)),
        WAVEFRONTS,
    )
    rows = []
    for read, row in zip(reads, counted):
        wrong = check_read(read)
        # Some versions of ncu count ldmatrix among all accesses and not among the loads.
        per_read = (row["wavefronts"] or row["all_wavefronts"]) / REPEATS
        expected = read.wavefronts()
        agrees = round(per_read) == expected
        row |= dataclasses.asdict(read) | {"lane_bytes": read.size, "lanes": len(read.lanes())}
        row |= {"expected": expected, "counted": per_read, "agrees": agrees}
        rows.append(row | {"status": "wrong" if wrong else "ok", "reason": wrong})
    return rows


def describe(maps: list[dict], reads: list[dict]) -> str:
    """Return what the rows of both experiments say, in sentences."""
    accepted, agree = (
        sum(row[key] == value for row in maps)
        for key, value in (("driver", "CUDA_SUCCESS"), ("agrees", True))
    )
    other = [row for row in reads if not row["agrees"]]
    text = (
        f"The driver accepts {accepted} of {len(maps)} random maps, and it agrees with the rules in {agree}. The "
        f"profiler counts as many wavefronts as the microscope in {len(reads) - len(other)} of {len(reads)} reads."
    )
    counts = [(f"{row['counted']:.2f} instead of {row['expected']}", row["name"]) for row in other]
    return " ".join([text, *(f"It counts {count} for a {name}." for count, name in counts)])


def launch_all() -> None:
    """Launch every read once for the profiler to watch."""
    for read in make_random_reads():
        profiler.launch_watched(prepare_read(read)[0])


if __name__ == "__main__":
    launch_all()
