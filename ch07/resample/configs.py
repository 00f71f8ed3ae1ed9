"""The ladder of resample kernels, and how a kernel cuts a problem into work items."""

import math
from dataclasses import dataclass

import torch

from ch07.bulk_copy.configs import require_ranges
from tilelab.runtime import spoken

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "float"}
# Each kernel and its idea, in the order of the course.
LADDER = {
    "search_a_thread": "one thread per element, each searches",
    "lane0_search": "one warp per target, lane 0 searches and shuffles: the note's phase 1",
    "ballot_search": "one warp per target, 32 pivots per step",
    "shared_search": "one search per target, shared by the block",
    "vectors": "16 bytes per thread, several rows in flight",
    "persistent": "the same with a grid that stays",
    "bulk_rows": "rows by one bulk copy: the note's phase 3",
}
BEST = "vectors"
# A block copies so many source times to shared memory; more are searched in global memory.
MAX_SHARED_TIMES = 2048
EXAMPLE = (512, 1024, 2048, 128)  # B, S, T, D
ALLOWED = {
    "threads": range(32, 1025, 32),
    "targets": range(1, 1025),
    "targets_in_flight": range(1, 9),
    "sample": range(0, 4097),
}

PHRASES = {
    "kernel": "{}",
    "threads": "{} threads",
    "targets": "{} targets",
    "targets_in_flight": "{} in flight",
    "sample": "1 of {} times in shared memory",
}
Shape = tuple[int, int, int, int]  # B, S, T, D


@dataclass(frozen=True)
class ResampleConfig:
    """A kernel of the ladder, in blocks of `threads` threads, with `targets` targets per work item.

    A thread loads the rows of `targets_in_flight` targets before it uses the first row; in `vectors` these are as many
    vectors. In `vectors`, shared memory holds every `sample`-th source time, a power of two. 0 stands for all, or for
    none where they are more than MAX_SHARED_TIMES; so it is in the other kernels.
    """

    kernel: str
    threads: int
    targets: int
    targets_in_flight: int = 1
    sample: int = 0

    def __post_init__(self):
        if self.kernel not in LADDER:
            raise ValueError(f"unknown kernel {self.kernel!r}; choose one of {', '.join(LADDER)}.")
        require_ranges(self, ALLOWED)
        if self.sample & (self.sample - 1):
            raise ValueError(f"sample is {self.sample}; it must be a power of two or 0.")
        if self.kernel != "vectors" and self.sample:
            raise ValueError(f"sample is an option of vectors; the kernel is {self.kernel}.")

    @property
    def name(self) -> str:
        """Return the spoken name, such as "vectors · 128 threads · 64 targets · 4 in flight"."""
        return spoken.say(self, PHRASES)

    def __str__(self) -> str:
        return self.name

    def constants(self, dtype: torch.dtype, shape: Shape, vector_bytes: int = 0) -> dict[str, str | int]:
        """Return the macros that resample.cu is compiled with for a problem of `shape` (B, S, T, D).

        A thread loads and stores `vector_bytes` with one instruction: by default 16, or the largest power of two that
        divides a row.
        """
        _, sources, targets, depth = shape
        row_bytes = depth * dtype.itemsize
        sample = self.sample or 1
        times = max(2, 1 << (-(-sources // sample) - 1).bit_length())
        # Beside the times, each target takes 32 bytes of the 48 KiB of static shared memory.
        if times > (MAX_SHARED_TIMES if self.sample == 0 else 12256 - 8 * self.targets):
            times, sample = 0, 1
        # Half more than even targets need.
        rows = math.ceil(1.5 * self.targets * sources / max(targets, 1)) + 4
        return {
            "ELEMENT": ELEMENTS[dtype],
            "DEPTH": depth,
            "VECTOR_BYTES": vector_bytes or math.gcd(16, row_bytes),
            "THREADS": self.threads,
            "TARGETS": self.targets,
            "TIMES": times,
            "TARGETS_IN_FLIGHT": self.targets_in_flight,
            "SAMPLE": sample,
            "ROWS": min(rows, 65536 // row_bytes),
        }  # fits every target beside the static shared memory

    def smem_bytes(self, dtype: torch.dtype, shape: Shape) -> int:
        """Return the dynamic shared memory of a block: room for the rows that one bulk copy brings."""
        rows = self.constants(dtype, shape)["ROWS"]
        return rows * shape[3] * dtype.itemsize if self.kernel == "bulk_rows" else 0


def parse(text: str) -> ResampleConfig:
    """Return the configuration of a spoken name; commas may separate its parts."""
    fields = spoken.read(text, PHRASES)
    if not {"kernel", "threads", "targets"} <= fields.keys():
        raise ValueError(f"the name {text[:60]!r} must have a kernel, its threads and its targets.")
    return ResampleConfig(**fields)


def fit_config(kernel: str, shape: Shape, itemsize: int, sms: int) -> ResampleConfig:
    """Return the configuration of `kernel` for a problem of `shape` (B, S, T, D) on a GPU of `sms` SMs.

    A work item writes about 32 KB, because the search weighs too much in a smaller one. But where that would give fewer
    than four items per SM, items become smaller until they fill the GPU.
    """
    if kernel in ("search_a_thread", "lane0_search", "ballot_search"):
        return ResampleConfig(kernel, 256, 64)
    batches, sources, count, depth = shape
    row_bytes = depth * itemsize
    if kernel == "vectors":
        return _fit_vectors(batches, sources, count, row_bytes, sms)
    targets = 1 << max(4, min(9, int(math.log2(max(1, 32768 // row_bytes)))))
    while targets > 32 and batches * math.ceil(count / targets) < 4 * sms:
        targets //= 2
    threads = 256 if targets * row_bytes < 32768 or targets == 512 or kernel == "bulk_rows" else 128
    vectors_per_thread = targets * max(1, row_bytes // math.gcd(16, row_bytes)) // threads
    # bulk_rows reads shared memory, which answers before a second load could be issued.
    most = 1 if kernel == "bulk_rows" else 2 if targets == 512 else 4
    power_of_two = 1 << (max(vectors_per_thread, 1).bit_length() - 1)
    return ResampleConfig(kernel, threads, targets, min(most, power_of_two))


def _fit_vectors(batches: int, sources: int, count: int, row_bytes: int, sms: int) -> ResampleConfig:
    threads = 128
    targets = max(16, min(512, 32768 // row_bytes))
    if targets > threads:  # a power of two: in the last round of the search, all threads have a target
        targets = 1 << (targets - 1).bit_length()
    while targets > 32 and batches * math.ceil(count / targets) < 4 * sms:
        targets //= 2
    # One of 16 times in shared memory: the last four steps of a search read half of a line of 128 bytes. Up to 4096
    # times, one of 8 still takes little shared memory and saves a step in global memory.
    sample = 0 if sources <= MAX_SHARED_TIMES else 8 if sources <= 4096 else 16
    return ResampleConfig("vectors", threads, targets, 4, sample)


def configs(shape: Shape = EXAMPLE, itemsize: int = 2, sms: int = 132) -> dict[str, ResampleConfig]:
    """Return the configuration of each kernel by the kernel's name, by default for a large problem on an H200."""
    return {kernel: fit_config(kernel, shape, itemsize, sms) for kernel in LADDER}
