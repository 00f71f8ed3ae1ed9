"""Name the tile configurations of the grouped kernel, and choose one for a shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ch14.gemm.configs import PHRASES as OF_GEMM
from ch14.gemm.configs import GemmConfig
from ch14.gemm.configs import rejection as rejection_of_gemm
from tilelab.runtime import spoken
from tilelab.runtime.build import Job

BLOCK = 128  # A scale covers this many elements along K, and this many columns of B.
MANY_ROWS = 80  # From more rows per group on, tiles of 128 rows take less time than tiles of 64; in float8 from BLOCK.
FEW_ROWS = 32  # Up to this many, swapped.cu takes less time than Triton for SwiGLU in bf16 on Hopper.
PHRASES = {name: phrase for name, phrase in OF_GEMM.items() if name not in ("swap", "kernel", "splits")}
PHRASES |= {"fused": "fused", "halves": "halves"}


@dataclass(frozen=True)
class GroupedConfig(GemmConfig):
    """Hold the tile of the grouped kernel: block_m rows of a group by block_n columns, in steps of block_k along K.

    With `fused`, the loads of a tile run ahead during the epilogue of the tile before. With `halves`, of float8, the
    upper and the lower half of a tile are multiplied in turn. `ch14.gemm.configs.GemmConfig` explains the other
    fields. block_n is a power of two. With SwiGLU, half of the columns are gates.
    """

    kernel: str = "persistent"
    fused: bool = False
    halves: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.kernel != "persistent" or self.swap or self.columns[1]:
            raise ValueError(f"a grouped tile is persistent and 2^n columns wide; it is {self.name}.")
        if self.halves and self.fused:
            raise ValueError(
                f"Triton fuses no loops with a branch, which halves need; the tile is {self.name}."
            )

    @property
    def name(self) -> str:
        """Return the spoken name, such as "128×128×64 · 4 warps · 5 stages · fused"."""
        return spoken.say(self, PHRASES)

    def __str__(self) -> str:
        return self.name

    def boxes(self, b_k_major: bool, swiglu: bool) -> dict[str, list[int]]:
        """Return the boxes of the descriptors by the kernel's names."""
        rows, k = self.block_m // (1 + self.halves), self.block_k
        b = [1, self.block_n, k] if b_k_major else [1, k, self.block_n]
        if swiglu:
            b = [1, 2, self.block_n // 2, k]
        columns = self.block_n // (1 + swiglu) // self.epilogue_subtile
        return {"a_desc": [rows, k], "b_desc": b, "c_desc": [1, 1, rows, columns]}

    def constants_for(
        self, groups: int, sms: int, b_k_major: bool, masked: bool, swiglu: bool
    ) -> dict[str, Any]:
        """Return the kernel's constexpr arguments for `groups` groups on a GPU with `sms` multiprocessors."""
        return dict(
            GROUPS=max(256, 1 << (groups - 1).bit_length()),  # one build for almost all models
            BLOCK_M=self.block_m,
            BLOCK_N=self.block_n,
            BLOCK_K=self.block_k,
            GROUP_M=self.group_m,
            EPILOGUE_SUBTILE=self.epilogue_subtile,
            PROGRAMS=sms * self.programs_per_sm,
            B_K_MAJOR=b_k_major,
            MASKED=masked,
            SWIGLU=swiglu,
            HALVES=self.halves,
            FUSED=self.fused,
            PDL=self.pdl,
        )


# In each list the first is for groups of many rows, the second for few, and the last for 99 KB of shared memory.
_BF16 = [
    GroupedConfig(128, 128, 64, 4, 3, epilogue_subtile=4, programs_per_sm=2, fused=True),
    GroupedConfig(64, 256, 64, 4, 4, epilogue_subtile=2, fused=True),
    GroupedConfig(64, 128, 64, 4, 3, epilogue_subtile=2),
]
_BF16_SWIGLU = [
    GroupedConfig(128, 256, 64, 8, 4),
    GroupedConfig(64, 256, 64, 4, 4, pdl=True),
    GroupedConfig(64, 128, 64, 4, 3, epilogue_subtile=2),
]
_FP8 = [
    GroupedConfig(128, 128, 128, 4, 3, epilogue_subtile=2, programs_per_sm=2, halves=True),
    GroupedConfig(64, 128, 128, 4, 4, epilogue_subtile=2, programs_per_sm=2, pdl=True),
    GroupedConfig(64, 128, 128, 4, 3, epilogue_subtile=2),
]
_FP8_SWIGLU = [GroupedConfig(64, 256, 128, 8, 4, pdl=True), GroupedConfig(64, 256, 128, 8, 2)]
_GRADIENT = [
    GroupedConfig(128, 128, 64, 4, 3, epilogue_subtile=4, programs_per_sm=2, fused=True),
    GroupedConfig(64, 128, 64, 4, 3, epilogue_subtile=2, fused=True),
]
SETS = {
    ("bf16", False): _BF16,
    ("bf16", True): _BF16_SWIGLU,
    ("fp8", False): _FP8,
    ("fp8", True): _FP8_SWIGLU,
}


def configs() -> dict[str, GroupedConfig]:
    """Return the configurations that "best" chooses from, by name."""
    return {config.name: config for each in SETS.values() for config in each}


def rejection(config: GroupedConfig, target: str, dtype: str = "bf16", swiglu: bool = False) -> str:
    """Return in one sentence why `config` cannot run on `target`, or "". With SwiGLU half of the columns are stored."""
    if config.halves and not target.startswith("sm_90"):
        return "the second half of a tile finds registers on Hopper only."
    stored = replace(config, epilogue_subtile=config.epilogue_subtile * (1 + swiglu))
    return rejection_of_gemm(stored, target, dtype)


def best_config(rows: float, n: int, dtype: str, swiglu: bool, target: str) -> GroupedConfig | None:
    """Return the configuration for groups of `rows` rows on average and n columns; None if none runs on `target`."""
    able = [config for config in SETS[dtype, swiglu] if not rejection(config, target, dtype, swiglu)]
    many = BLOCK if dtype == "fp8" else MANY_ROWS
    low = [config for config in able if config.block_m == 64 or rows > many]
    return next(iter(low or able), None)


def gradient_config(m: int, n: int, target: str) -> GroupedConfig:
    """Return the tile of a weight gradient of m x n: the first that runs on `target`, the last for few columns."""
    able = [each for each in _GRADIENT if min(m, n) >= 128 and not rejection(each, target)]
    return [*able, _GRADIENT[-1]][0]


def parse(text: str) -> GroupedConfig:
    """Return the configuration of a name, as `GroupedConfig.name` says it."""
    return GroupedConfig(**spoken.read(text, PHRASES))


_TRITON_TYPES = {"bf16": "bf16", "fp8": "fp8e4nv"}
_SIZES = "groups N K capacity stride_cs stride_sa_group stride_sa_m stride_sa_k stride_sb_group stride_sb_k"


def job(
    config: GroupedConfig,
    target: str,
    dtype: str = "bf16",
    b_k_major: bool = True,
    masked: bool = False,
    swiglu: bool = False,
    groups: int = 64,
    sms: int = 132,
) -> Job:
    """Return the `tilelab.runtime.build.Job` that compiles `config` for `target`; fp8 with SwiGLU also quantises."""
    types = dict.fromkeys(("a_desc", "b_desc"), _TRITON_TYPES[dtype])
    types["c_desc"] = _TRITON_TYPES[dtype if swiglu else "bf16"]
    boxes = config.boxes(b_k_major, swiglu)
    signature = {name: f"tensordesc<{kind}{boxes[name]}>" for name, kind in types.items()}
    signature["ends_ptr"] = "*i32"
    constants = config.constants_for(groups, sms, b_k_major, masked, swiglu)
    scales = {
        "scale_a_ptr": dtype == "fp8",
        "scale_b_ptr": dtype == "fp8",
        "c_scale_ptr": dtype == "fp8" and swiglu,
    }
    for name, is_given in scales.items():
        if is_given:
            signature[name] = "*fp32"
        else:
            constants[name] = None
    signature |= dict.fromkeys((*_SIZES.split(), "stride_sb_n"), "i32")
    if dtype == "fp8":
        signature.pop("stride_sa_m")
        constants["stride_sa_m"] = 1
    aligned = [name for name in signature if name.endswith("ptr") or name == "stride_sa_m"]
    options = {"launch_pdl": True} if config.pdl else {}
    return Job(
        *(
            "ch14.moe.kernels:grouped_kernel",
            signature,
            constants,
            target,
            config.num_warps,
            config.num_stages,
        ),
        *(tuple(aligned), options, config.name),
    )
