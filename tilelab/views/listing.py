"""The PTX and the SASS of a configuration, line by line, as the view `code` shows them side by side."""

from __future__ import annotations

import re

from tilelab.runtime import build
from tilelab.runtime.device import Unsupported

# The kind of a line follows from its opcode; the first pattern that matches decides. Fences, and waits for asynchronous
# work, count as barriers. Synchronisation within a warp, constants and parameters do not count.
PTX_KINDS = {
    "barrier": r"mbarrier\.|bar\.(?!warp)|barrier\.|fence\.|membar\.|wgmma\.(fence|commit_group|wait_group)|"
    r"cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all|mbarrier)|"
    r"tcgen05\.(commit|wait|fence)|griddepcontrol\.wait",
    "tma": r"cp\.(reduce\.)?async\.bulk",
    "mma": r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|wmma\.mma",
    "load": r"ld\.(?!param)|ldmatrix\.|tcgen05\.ld|cp\.async\.",
    "store": r"st\.(?!param)|stmatrix\.|tcgen05\.st|red\.|atom\.",
}
SASS_KINDS = {
    "barrier": r"(SYNCS|BAR|FENCE|MEMBAR|U?DEPBAR|LDGDEPBAR|WARPGROUP|UTMACMDFLUSH|UTMACCTL|UTCBAR|ACQBULK)\b|UCGABAR_",
    "tma": r"UTMA(LDG|STG|REDG|PF)|UBLK(CP|RED|PF)",
    "mma": r"UTC[A-Z]*MMA|[A-Z]G?MMA\b",
    "load": r"(LD[GSL]?|LDGSTS|LDSM|LDTM|ULDG)\b",
    "store": r"(ST[GSL]?|STSM|STTM|STAS|ATOM[A-Z]*|RED[GS]?)\b",
}
PTX_NOTE = "Without comments, source positions and debug sections; a long list of registers shows its first and last."
SASS_NOTE = (
    "Without addresses, encodings and the padding at the end; branches name labels instead of addresses."
)
LONG_LIST = 8  # registers; the accumulators of one wgmma are up to 128


def load_code(job: build.Job, timeout_s: float = 120, cancel_token: object = None) -> dict:
    """Compile `job` in a worker process and return {name, target, ptx, sass, notes, reason} for the view `code`.

    `ptx` and `sass` are lists of [kind, text]; the kind of a line is "tma", "barrier", "mma", "load", "store" or "".
    `notes` says what the listings leave out. `reason` is one sentence where something failed, and a listing that could
    not be made is empty. A second call reads the compilers' caches.
    """
    code = {
        "name": job.name or job.kernel.rpartition(":")[2],
        "target": job.target,
        "ptx": [],
        "sass": [],
        "notes": {"ptx": PTX_NOTE, "sass": SASS_NOTE},
        "reason": "",
    }
    try:
        report = build.build_one(job, timeout_s, cancel_token=cancel_token, keep_ptx=True)
        code |= {"reason": report.reason, "ptx": read_ptx(report.ptx)}
        if report.cubin:
            code["sass"] = read_sass(report.sass)
    except (OSError, RuntimeError, ValueError, Unsupported) as error:
        code["reason"] = f"{str(error).rstrip('.')}."
    return code


def read_ptx(text: str) -> list[list[str]]:
    """Return [kind, text] for each line of PTX, less comments, source positions and debug sections."""
    text = re.sub(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}", "", text, flags=re.MULTILINE | re.DOTALL)
    # Labels of the debug sections, and positions in the source, say nothing about what the kernel does.
    text = re.sub(
        r"^\s*(\.loc\b|\.file\b|\$L__(tmp|func_|info_)|\.section\s+\.debug).*", "", text, flags=re.MULTILINE
    )
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"\{[^{}\n]*\}", _shorten_list, text)
    lines = [re.sub(r"[ \t]+", " ", line).strip() for line in text.splitlines()]
    inside, listing = 0, []
    for line in filter(None, lines):
        inside -= line.startswith("}")
        is_label = line.startswith("$") and line.endswith(":")
        listing.append([_find_kind(line, PTX_KINDS), "  " * (max(inside, 0) if not is_label else 0) + line])
        inside += line.count("{") - line.count("}") + line.startswith("}")
    return listing


def _shorten_list(found: re.Match) -> str:
    registers = re.split(r"\s*,\s*", found[0].strip("{} "))
    if len(registers) <= LONG_LIST:
        return found[0]
    return f"{{{registers[0]}, ... {len(registers)} in all ..., {registers[-1]}}}"


def read_sass(text: str) -> list[list[str]]:
    """Return [kind, text] for each instruction in what cuobjdump prints, with labels for the targets of branches."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;", text, re.MULTILINE)
    while found and found[-1][1] == "NOP":
        found.pop()
    # A branch to itself stands behind each kernel and keeps the prefetcher in; its label would be the last line.
    addresses = {int(address, 16) for address, _ in found}
    targets = {int(target, 16) for _, line in found for target in _find_targets(line)} & addresses
    labels = {address: f".L{number}" for number, address in enumerate(sorted(targets), 1)}
    listing = []
    for address, line in found:
        if label := labels.get(int(address, 16)):
            listing.append(["", f"{label}:"])
        for target in _find_targets(line):
            line = line.replace(target, labels.get(int(target, 16), target))
        listing.append([_find_kind(line, SASS_KINDS), f"  {line}"])
    return listing


def _find_targets(line: str) -> list[str]:
    """Return the addresses in the code that a branch, a call or a convergence point names."""
    is_branch = re.match(r"(@!?U?P\w+\s+)?(BRA|BRX|CALL|BSSY|JMP|WARPSYNC\.COLLECTIVE|BREAK)\b", line)
    return re.findall(r"\b0x[0-9a-f]+\b", line) if is_branch else []


def _find_kind(line: str, kinds: dict[str, str]) -> str:
    opcode = re.sub(r"^@!?%?\w+\s+", "", line)
    return next((kind for kind, pattern in kinds.items() if re.match(pattern, opcode)), "")
