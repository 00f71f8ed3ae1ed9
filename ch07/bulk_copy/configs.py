"""Configurations of the bulk copy kernels: how a kernel cuts its arrays, and the course's choices."""

from dataclasses import dataclass

from tilelab.runtime import spoken

KERNELS = ("loads", "cp_async", "bulk", "bulk_in_order")
UNIT = 16  # bytes: a bulk copy moves whole units between addresses that are multiples of 16
ALLOWED = {
    "threads": range(32, 1025, 32),
    "stages": range(1, 1025),
    "chunks_per_cta": range(1 << 20),
    "ctas_per_sm": range(1, 33),
    # An mbarrier counts fewer than 2^20 bytes, and one phase of a x + y loads a chunk of two arrays.
    "chunk_bytes": range(UNIT, 1 << 19, UNIT),
}

PHRASES = {
    "kernel": "{}",
    "threads": "{} threads",
    "chunk_bytes": "{} B per chunk",
    "stages": "{} stages",
    "chunks_per_cta": "{} chunks per CTA",
    "ctas_per_sm": "{} CTAs per SM",
}
PERSISTENT, NO_CHUNKS = "persistent", "0 chunks per CTA"


def require_ranges(config: object, allowed: dict[str, range]) -> None:
    """Raise ValueError unless each field that `allowed` names is in its range."""
    for name, values in allowed.items():
        if getattr(config, name) not in values:
            step = f" in steps of {values.step}" if values.step > 1 else ""
            raise ValueError(
                f"{name} is {getattr(config, name)}; it must be {values[0]:,} to {values[-1]:,}{step}."
            )


@dataclass(frozen=True)
class BulkConfig:
    """A way to cut arrays into chunks of `chunk_bytes`, with a ring of `stages` chunks in shared memory.

    A CTA of `threads` threads handles `chunks_per_cta` neighbouring chunks. With `chunks_per_cta` 0 the grid is
    persistent: `ctas_per_sm` CTAs run on each SM until all chunks are done.
    """

    kernel: str
    threads: int
    chunk_bytes: int
    stages: int = 1
    chunks_per_cta: int = 1
    ctas_per_sm: int = 1

    def __post_init__(self):
        if self.kernel not in KERNELS:
            raise ValueError(f"unknown kernel {self.kernel!r}; choose one of {', '.join(KERNELS)}.")
        require_ranges(self, ALLOWED)
        if self.kernel == "loads" and (self.stages, self.chunks_per_cta) != (1, 1):
            raise ValueError("loads has no ring; its stages and chunks_per_cta must be 1.")
        if self.kernel == "bulk_in_order" and self.chunks_per_cta:
            raise ValueError("bulk_in_order is persistent; its chunks_per_cta must be 0.")

    @property
    def name(self) -> str:
        """Return the spoken name, such as "bulk · 32 threads · 2048 B per chunk · 4 stages · 8 chunks per CTA"."""
        return spoken.say(self, PHRASES).replace(f"· {NO_CHUNKS}", f"· {PERSISTENT}")

    def __str__(self) -> str:
        return self.name

    def smem_bytes(self, arrays: int) -> int:
        """Return the dynamic shared memory of a CTA that reads 1 array (copy) or 2 (a x + y)."""
        return 0 if self.kernel == "loads" else self.stages * arrays * self.chunk_bytes

    def constants(self, element: str) -> dict[str, str | int]:
        """Return the macros that bulk_copy.cu is compiled with."""
        return {
            "ELEMENT": element,
            "THREADS": self.threads,
            "CHUNK_BYTES": self.chunk_bytes,
            "STAGES": self.stages,
            "CHUNKS_PER_CTA": self.chunks_per_cta,
        }


def parse(text: str) -> BulkConfig:
    """Return the configuration of a spoken name. ValueError for other text."""
    fields = spoken.read(text.replace(PERSISTENT, NO_CHUNKS), PHRASES)
    if "ctas_per_sm" in fields:
        fields.setdefault("chunks_per_cta", 0)
    if not {"kernel", "threads", "chunk_bytes"} <= fields.keys():
        raise ValueError(f"the name {text[:60]!r} must have a kernel, its threads and the bytes per chunk.")
    return BulkConfig(**fields)


CONFIGS = {  # The first of each operator was the fastest in the sweep on an H200.
    "copy": {
        "loads": BulkConfig("loads", 256, 4096),
        "cp_async": BulkConfig("cp_async", 128, 2048, stages=2, chunks_per_cta=2),
        "bulk_single": BulkConfig("bulk", 32, 2048),
        "bulk_batch": BulkConfig("bulk", 32, 2048, stages=2, chunks_per_cta=2),
        "bulk_ring": BulkConfig("bulk", 32, 2048, stages=4, chunks_per_cta=8),
    },
    "axpy": {
        "bulk_batch": BulkConfig("bulk", 256, 2048, stages=2, chunks_per_cta=2),
        "loads": BulkConfig("loads", 1024, 16384),
        "cp_async": BulkConfig("cp_async", 128, 2048, stages=2, chunks_per_cta=2),
        "bulk_single": BulkConfig("bulk", 256, 4096),
        "bulk_ring": BulkConfig("bulk", 256, 2048, stages=3, chunks_per_cta=6),
    },
}
OPS = tuple(CONFIGS)


def configs(op: str = "copy") -> dict[str, BulkConfig]:
    """Return the configurations of `op`, "copy" or "axpy", by name. The fastest is the first."""
    if op not in CONFIGS:
        raise ValueError(f"unknown op {op!r}; choose {' or '.join(CONFIGS)}.")
    return CONFIGS[op]
