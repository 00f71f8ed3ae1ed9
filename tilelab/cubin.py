"""What is in a cubin: its kernels, what they need, and their instructions, SASS."""

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

from tilelab import cuda

# How data moves, in the SASS of a .cu kernel: by threads, by threads without registers, by the copy engine; barriers.
OPCODES = ("LDG", "STG", "LDS", "STS", "LDGSTS", "UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG", "SYNCS")


def _sections(cubin: bytes) -> dict[str, tuple[int, int]]:
    """Where each section of the ELF file begins and its length."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError("the cubin is no ELF file")
    table, = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * index) for index in range(count)]
    return {_string(cubin, headers[names][4] + header[0]): header[4:] for header in headers}


def _string(cubin: bytes, at: int) -> str:
    return cubin[at:cubin.index(b"\0", at)].decode()


def entries(cubin: bytes) -> dict[int, str]:
    """The names of its kernels, by their index in the symbol table."""
    sections = _sections(cubin)
    at, length = sections[".symtab"]
    symbols = [struct.unpack_from("<IBB", cubin, at + 24 * index) for index in range(length // 24)]
    return {index: _string(cubin, sections[".strtab"][0] + name)
            for index, (name, _, other) in enumerate(symbols) if other & 0x10}  # STO_CUDA_ENTRY


def resources(cubin: bytes, kernel: str = "") -> dict:
    """Registers and stack, from the attributes that ptxas writes to .nv.info, and shared memory: of `kernel`, or of a
    cubin's only one.

    They are what `cuobjdump -res-usage` prints, without another process and for targets newer than that tool.
    """
    sections = _sections(cubin)
    names = entries(cubin) if kernel else {}
    at, length = sections.get(".nv.info", (0, 0))
    end, registers, stack = at + length, [], []
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", cubin, at)
        if attribute in (0x2F, 0x12):  # EIATTR_REGCOUNT, EIATTR_MIN_STACK_SIZE: a symbol and its figure
            symbol, figure = struct.unpack_from("<II", cubin, at + 4)
            if names.get(symbol, "") == kernel:
                (registers if attribute == 0x2F else stack).append(figure)
        at += 4 + (value if form == 4 else 0)  # form 4: `value` is the length of what follows
    static = sum(length for name, (_, length) in sections.items()
                 if name.startswith(".nv.shared.") and "reserved" not in name
                 and (not kernel or name == f".nv.shared.{kernel}"))
    return {"registers": max(registers, default=None), "spills": max(stack, default=None), "smem_static": static}


def _tool(name: str) -> pathlib.Path:
    found = importlib.util.find_spec("triton")  # found, not imported
    return pathlib.Path(found.origin).parent / "backends/nvidia/bin" / name


def cuobjdump(flag: str, cubin: bytes, *more: str) -> str:
    # A listing takes as long as it took to compile, and many ask for the same: it is kept beside the cubins.
    what = (flag, *more, version("triton")), cubin
    path = cuda.cubin_folder() / (hashlib.sha256(repr(what).encode()).hexdigest() + ".listing")
    if kept := cuda.read_cached(path):
        return zlib.decompress(kept).decode()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_tool("cuobjdump"), flag, *more, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines()
        raise RuntimeError(f"the cuobjdump of Triton {version('triton')} cannot read this cubin: {' '.join(said[:1])}")
    cuda.write_cached(path, zlib.compress(done.stdout.encode(), 1))
    return done.stdout


def sass(cubin: bytes, kernel: str = "") -> str:
    """SASS of a cubin, or of one kernel in it, through the cuobjdump in Triton's wheel; RuntimeError says why it could
    not be read."""
    return cuobjdump("-sass", cubin, *(["-fun", kernel] if kernel else []))


def sass_counts(cubin: bytes, kernel: str = "") -> collections.Counter:
    """Occurrences in SASS of opcodes, without their suffixes: TMA (UTMALDG, UTMASTG, UBLKCP), mbarrier (SYNCS), tensor
    core (HGMMA, UTCHMMA, HMMA...), loads and stores by threads (LDG, STG, LDS, STS, LDGSTS) and fences (FENCE).

    Of one kernel where it is named; RuntimeError as for `sass`.
    """
    opcodes = r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?" \
              r"(UTMA[A-Z]+|UBLKCP|UBLKRED|SYNCS|UTC[A-Z]*MMA|[A-Z]G?MMA|LDGSTS|LDG|STG|LDS|STS|FENCE)\b"
    return collections.Counter(re.findall(opcodes, sass(cubin, kernel), re.MULTILINE))


def ptxas_remarks(ptx: str, target: str) -> list[str]:
    """What ptxas has to say about performance, "wgmma instructions are serialized" above all; Triton drops it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [_tool("ptxas"), f"--gpu-name={target}", path, "-o", path.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses this PTX: {(done.stdout + done.stderr).strip().splitlines()[:1]}")
    return re.findall(r"\(C\d+\) Potential Performance Loss: .+", done.stdout + done.stderr)
