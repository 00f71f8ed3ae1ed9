"""The formats that have kernels, and the launch configurations of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

from ch14.mx_formats.number_formats import BlockFormat, lookup
from tilelab.runtime import operands, spoken

FUSED = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp4_e8m0_16", "fp8_1x128")


@dataclass(frozen=True)
class MxConfig:
    """A way to launch a kernel.

    elements: elements per program, a power of two. num_warps: warps per program. convert: round to fp8 with the
    hardware's conversion instruction; otherwise the kernel rounds in float32 arithmetic. saturate: round to fp4 by
    saturating additions, which take fewer of the slow instructions; from sm_90 on.
    """

    elements: int
    num_warps: int = 4
    convert: bool = True
    saturate: bool = False

    def __post_init__(self):
        operands.require_whole_numbers(self)
        for name, least, most in (("elements", 128, 65536), ("num_warps", 1, 32)):
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from {least} to {most:,}; it is {value}.")

    @property
    def name(self) -> str:
        """Return the spoken name, such as "4096 elements · 4 warps · saturate"."""
        parts = [f"{self.elements} elements", spoken.count(self.num_warps, "warps")]
        if not self.convert:
            parts.append("arithmetic")
        if self.saturate:
            parts.append("saturate")
        return spoken.SEPARATOR.join(parts)

    def __str__(self) -> str:
        return self.name


PHRASES = {
    "elements": "{} elements",
    "num_warps": "{} warps",
    "arithmetic": "arithmetic",
    "saturate": "saturate",
}


def parse(text: str) -> MxConfig:
    """Return the configuration with this name. ValueError for other text."""
    fields = spoken.read(text, PHRASES)
    return MxConfig(convert=not fields.pop("arithmetic", False), **fields)


DEQUANTISE_CONFIG = MxConfig(2048)


def format_with_kernels(format: str | BlockFormat) -> BlockFormat:
    """Return a format by its name. Raise ValueError for a format that only `number_formats` implements."""
    if not isinstance(format, BlockFormat):
        format = lookup(format)
    if format.name not in FUSED or format != lookup(format.name):
        raise ValueError(
            f"{format.name} ({format.element.name}, blocks {format.block}, scales {format.scale}) has no "
            f"kernel, only a meaning in number_formats; formats with kernels are {', '.join(FUSED)}."
        )
    return format


def configs(format: str | BlockFormat = "mxfp8_e4m3") -> dict[str, MxConfig]:
    """Return the named configurations for quantising to a format, the fastest first. The names depend on the format."""
    format = format_with_kernels(format)
    if format.element.bits == 8:
        return {"cvt": MxConfig(4096), "arithmetic": MxConfig(4096, convert=False)}
    # A lane that holds a whole group needs no shuffle and computes the group's scale once. "arithmetic" rounds with
    # what every GPU has, in programs of as many groups as threads.
    return {
        "group_a_lane": MxConfig(4096 if format.block[1] == 32 else 8192, saturate=True),
        "arithmetic": MxConfig(128 * format.block[1]),
    }


def choose_config(config: str | MxConfig, format: BlockFormat, operation: str = "quantise") -> MxConfig:
    """Return the configuration that `config` ("best", a name or an MxConfig) stands for in an operation."""
    named = configs(format)
    best = next(iter(named.values())) if operation == "quantise" else DEQUANTISE_CONFIG
    return operands.choose_config(config, named, MxConfig, lambda: best, parse)
