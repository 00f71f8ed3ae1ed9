"""The three suspicions that `ch14.bug_hunt` searches: axes, how a configuration is built, and the name of its outcome.

A configuration is a dict with one value per axis. The values of an axis are listed with the simplest first. The hash of
the recorded builds covers `threads`, `operands` and the functions that begin with an underscore. Their names,
parameters and code stay as they were recorded.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from tilelab.runtime.build import Job, Report

KERNELS = pathlib.Path(__file__).with_name("kernels.py")
BLOCK_N = 128
PRODUCTS = r"(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)[\w.:]*"


@dataclass(frozen=True)
class Hunt:
    """A suspicion: `start` is the suspected configuration, `target` the suspected target.

    `job(config, target)` names the file of the kernel, which may be anyone's, and a report takes the source from there.
    `outcome(report)` returns one of `outcomes`; the first is the good outcome. `words` explain the values of an axis.
    `expected` states the good outcome for a report. `evidence` names regular expressions that show it in PTX.
    """

    name: str
    title: str
    axes: dict[str, tuple]
    start: dict
    target: str
    outcomes: tuple[str, ...]
    outcome: Callable[[Report], str]
    job: Callable[[dict, str], Job]
    words: dict[str, dict[str, str]]
    expected: str
    evidence: dict[str, str]

    @property
    def good(self) -> str:
        """The outcome of a build without the suspected bug."""
        return self.outcomes[0]

    def check_config(self, config: dict) -> None:
        """Raise ValueError unless `config` has one of the listed values for each axis."""
        if set(config) != set(self.axes):
            raise ValueError(
                f"a configuration of {self.name} must have {', '.join(self.axes)}; it has "
                f"{', '.join(config)}."
            )
        for axis, value in config.items():
            if value not in self.axes[axis]:
                raise ValueError(
                    f"{axis} must be one of {', '.join(map(str, self.axes[axis]))}; it is {value!r}."
                )


def threads(ptx: str) -> int:
    """Return the threads per block that the PTX requires: the kernel's own warps and those that specialisation adds."""
    found = re.search(r"\.(?:req|max)ntid (\d+)", ptx)
    return int(found[1]) if found else 0


def operands(ptx: str) -> str:
    """Return the operand types of the products in the PTX: "f16", "bf16", "mxf4nvf4". tcgen05 calls bf16 f16, too."""
    found = re.findall(PRODUCTS, ptx)
    kinds = (re.search(r"kind::(\w+)|\.f32\.(\w+)\.\w+", each) for each in found)
    return ", ".join(sorted({kind[1] or kind[2] for kind in kinds if kind}))


def _operands(loads: str, m: int, n: int, k: int) -> dict[str, str]:
    if loads != "host":
        return dict.fromkeys("abc", "*fp16")
    return {
        name: f"tensordesc<fp16[{rows}, {columns}]>"
        for name, rows, columns in (("a", m, k), ("b", k, n), ("c", m, n))
    }


def _job(kernel: str, signature: dict, constants: dict, target: str, warps: int, stages: int) -> Job:
    signature = signature | dict.fromkeys("MNK", "i32")
    aligned = tuple(name for name, kind in signature.items() if not kind.startswith("tensordesc"))
    return Job(f"{KERNELS}:{kernel}", signature, constants, target, warps, stages, aligned)


def _loop_job(config: dict, target: str) -> Job:
    constants = {
        "BLOCK_M": 128,
        "BLOCK_N": BLOCK_N,
        **{name: config[name] for name in ("BLOCK_K", "LOADS", "LOOP")},
    }
    return _job(
        "loop_kernel",
        _operands(config["LOADS"], 128, BLOCK_N, config["BLOCK_K"]),
        constants,
        target,
        config["num_warps"],
        config["num_stages"],
    )


def _specialize_job(config: dict, target: str) -> Job:
    constants = {
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": 64,
        "WARP_SPECIALIZE": True,
        **{name: config[name] for name in ("BLOCK_M", "LOADS", "LOOP")},
    }
    return _job(
        "specialized_kernel",
        _operands(config["LOADS"], config["BLOCK_M"], BLOCK_N, 64),
        constants,
        target,
        config["num_warps"],
        3,
    )


# (elements per byte, elements per scale, the name in tl.dot_scaled, type of the elements, type of the scales)
FORMATS = {
    "mxfp8": (1, 32, "e4m3", "*fp8e4nv", "*u8"),
    "mxfp4": (2, 32, "e2m1", "*u8", "*u8"),
    "nvfp4": (2, 16, "e2m1", "*u8", "*fp8e4nv"),
}


def _scaled_job(config: dict, target: str) -> Job:
    packed, group, name, elements, scales = FORMATS[config["FORMAT"]]
    constants = {
        "BLOCK_M": config["BLOCK_M"],
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": 128,
        "PACKED": packed,
        "GROUP": group,
        "FORMAT": name,
    }
    signature = {"a": elements, "a_scale": scales, "b": elements, "b_scale": scales, "c": "*fp32"}
    return _job("scaled_kernel", signature, constants, target, config["num_warps"], 3)


def _loop_outcome(report: Report) -> str:
    return "fails" if report.status == "failed" else "builds"


def _specialize_outcome(report: Report) -> str:
    if report.status == "failed":
        return "fails"
    return "real" if threads(report.ptx) > 32 * report.job.num_warps else "ignored"


def _scaled_outcome(report: Report) -> str:
    if report.status == "failed":
        return "fails"
    return "native" if report.counts["block_scale"] else "emulated"


LOADS = {
    "pointers": "tl.load",
    "device": "descriptors made in the kernel",
    "host": "descriptors passed to it",
}
LOOPS = {
    "plain": "loads and product of a step in one iteration",
    "guarded": "the same in an `if`",
    "carry b": "a product takes the tile of B that the previous iteration loaded",
    "carry b guarded": "the same, loaded in an `if`",
    "carry both": "a product takes both tiles from the previous iteration: a manual double buffer",
    "carry both guarded": "the same, loaded in an `if`",
}
NESTS = {
    "over K": "one tile per program, the loop over K specialised",
    "over K flat": "the same, flatten=True",
    "over tiles": "a persistent program, its loop over tiles specialised",
    "over tiles flat": "the same, flatten=True",
}

HUNTS = {
    hunt.name: hunt
    for hunt in (
        Hunt(
            "loop",
            "a GEMM loop",
            {
                "LOOP": tuple(LOOPS),
                "LOADS": tuple(LOADS),
                "BLOCK_K": (32, 64, 128),
                "num_stages": (1, 2, 3, 4),
                "num_warps": (2, 4, 8, 16),
            },
            {"LOOP": "plain", "LOADS": "device", "BLOCK_K": 128, "num_stages": 4, "num_warps": 16},
            "sm_100a",
            ("builds", "fails"),
            _loop_outcome,
            _loop_job,
            {"LOOP": LOOPS, "LOADS": LOADS},
            "The kernel compiles, as its neighbours below do.",
            {"products": PRODUCTS, "TMA": r"cp\.async\.bulk\.tensor"},
        ),
        Hunt(
            "warp_specialize",
            "a GEMM loop with warp_specialize=True",
            {"LOOP": tuple(NESTS), "LOADS": tuple(LOADS), "BLOCK_M": (64, 128), "num_warps": (4, 8, 16)},
            {"LOOP": "over K", "LOADS": "host", "BLOCK_M": 128, "num_warps": 4},
            "sm_90a",
            ("real", "ignored", "fails"),
            _specialize_outcome,
            _specialize_job,
            {"LOOP": NESTS, "LOADS": LOADS},
            "Warps are specialised: the PTX asks for more threads than 32 x num_warps. If that is impossible, a "
            "message says so.",
            {"threads per block": r"\.(?:req|max)ntid [\d, ]+", "setmaxnreg": r"setmaxnreg\.\w+"},
        ),
        Hunt(
            "dot_scaled",
            "tl.dot_scaled on block-scaled operands",
            {"FORMAT": ("mxfp8", "mxfp4", "nvfp4"), "BLOCK_M": (128, 64), "num_warps": (4, 8, 16)},
            {"FORMAT": "mxfp4", "BLOCK_M": 128, "num_warps": 4},
            "sm_121a",
            ("native", "emulated", "fails"),
            _scaled_outcome,
            _scaled_job,
            {},
            "The product is a block-scaled tensor core instruction, which PTX has for capability 10.x and 12.x.",
            {"products": PRODUCTS, "block_scale": r"\.block_scale"},
        ),
    )
}
