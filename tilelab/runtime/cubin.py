"""Read a cubin: its kernels, the resources that they need, and their instructions (SASS)."""

from __future__ import annotations

import collections
import hashlib
import importlib.util
import pathlib
import re
import struct
import subprocess
import tempfile
import zlib
from importlib.metadata import version

from tilelab.runtime import cuda

# Opcodes that move data in a .cu kernel: threads through registers (LD*, ST*), threads without registers (LDGSTS), the
# copy engine (UBLK*, UTMA*), and mbarriers (SYNCS).
OPCODES = "LDG STG LDS STS LDGSTS UBLKCP UBLKRED UTMALDG UTMASTG UTMAREDG SYNCS".split()
STO_CUDA_ENTRY = 0x10  # marks a kernel in the symbol table
EIATTR_REGCOUNT, EIATTR_MIN_STACK_SIZE = 0x2F, 0x12


def _read_sections(cubin: bytes) -> dict[str, tuple[int, int]]:
    """Return the offset and the length of each section of the ELF file."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError("the cubin is no ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * index) for index in range(count)]
    return {_read_string(cubin, headers[names][4] + header[0]): header[4:] for header in headers}


def _read_string(cubin: bytes, offset: int) -> str:
    return cubin[offset : cubin.index(b"\0", offset)].decode()


def kernel_names(cubin: bytes) -> dict[int, str]:
    """Return the names of the kernels by their index in the symbol table."""
    sections = _read_sections(cubin)
    offset, length = sections[".symtab"]
    symbols = [struct.unpack_from("<IBB", cubin, offset + 24 * index) for index in range(length // 24)]
    return {
        index: _read_string(cubin, sections[".strtab"][0] + name)
        for index, (name, _, other) in enumerate(symbols)
        if other & STO_CUDA_ENTRY
    }


def read_resources(cubin: bytes, kernel: str = "") -> dict:
    """Return `registers`, `spills` (stack, bytes) and `smem_static` (bytes) of `kernel`, or of a cubin's only one.

    ptxas writes them to .nv.info. `cuobjdump -res-usage` prints the same, but needs a process and knows fewer targets.
    """
    sections = _read_sections(cubin)
    names = kernel_names(cubin) if kernel else {}
    offset, length = sections.get(".nv.info", (0, 0))
    end, registers, stack = offset + length, [], []
    while offset < end:
        form, attribute, value = struct.unpack_from("<BBH", cubin, offset)
        if attribute in (EIATTR_REGCOUNT, EIATTR_MIN_STACK_SIZE):
            symbol, figure = struct.unpack_from("<II", cubin, offset + 4)
            if names.get(symbol, "") == kernel:
                (registers if attribute == EIATTR_REGCOUNT else stack).append(figure)
        offset += 4 + (value if form == 4 else 0)  # in form 4, `value` is the length of the data
    static = sum(
        length
        for name, (_, length) in sections.items()
        if name.startswith(".nv.shared.")
        and "reserved" not in name
        and (not kernel or name == f".nv.shared.{kernel}")
    )
    return {
        "registers": max(registers, default=None),
        "spills": max(stack, default=None),
        "smem_static": static,
    }


def _find_tool(name: str) -> pathlib.Path:
    found = importlib.util.find_spec("triton")  # found, not imported
    return pathlib.Path(found.origin).parent / "backends/nvidia/bin" / name


def cuobjdump(flag: str, cubin: bytes, *more: str) -> str:
    """Return what the cuobjdump in Triton's wheel prints. A listing takes long, so it is kept beside the cubins."""
    key = (flag, *more, version("triton")), cubin
    path = cuda.cubin_folder() / (hashlib.sha256(repr(key).encode()).hexdigest() + ".listing")
    if kept := cuda.read_cached(path):
        return zlib.decompress(kept).decode()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [_find_tool("cuobjdump"), flag, *more, file.name], capture_output=True, text=True, check=False
        )
    if run.returncode:
        message = (run.stderr + run.stdout).strip().splitlines()
        raise RuntimeError(
            f"the cuobjdump of Triton {version('triton')} cannot read this cubin: {' '.join(message[:1])}"
        )
    cuda.write_cached(path, zlib.compress(run.stdout.encode(), 1))
    return run.stdout


def sass(cubin: bytes, kernel: str = "") -> str:
    """Return the SASS of a cubin, or of one kernel in it. RuntimeError says why it cannot be read."""
    return cuobjdump("-sass", cubin, *(["-fun", kernel] if kernel else []))


def sass_counts(cubin: bytes, kernel: str = "") -> collections.Counter:
    """Count opcodes in the SASS, without their suffixes; of one kernel where it is named. RuntimeError as for `sass`.

    Counted are TMA (UTMALDG, UTMASTG, UBLKCP), mbarriers (SYNCS), tensor cores (HGMMA, UTCHMMA, HMMA, ...), loads and
    stores by threads (LDG, STG, LDS, STS, LDGSTS) and fences (FENCE).
    """
    opcodes = (
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?"
        r"(UTMA[A-Z]+|UBLKCP|UBLKRED|SYNCS|UTC[A-Z]*MMA|[A-Z]G?MMA|LDGSTS|LDG|STG|LDS|STS|FENCE)\b"
    )
    return collections.Counter(re.findall(opcodes, sass(cubin, kernel), re.MULTILINE))


def ptxas_remarks(ptx: str, target: str) -> list[str]:
    """Return ptxas's remarks on performance, which Triton drops: "wgmma instructions are serialized" above all."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [_find_tool("ptxas"), f"--gpu-name={target}", path, "-o", path.with_suffix(".cubin")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"ptxas refuses this PTX: {(run.stdout + run.stderr).strip().splitlines()[:1]}")
    return re.findall(r"\(C\d+\) Potential Performance Loss: .+", run.stdout + run.stderr)
