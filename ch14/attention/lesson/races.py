"""Tell, by a kernel's instructions, the reads of shared memory that racecheck takes for races between roles."""

import itertools
import re

# With a number of threads behind it, a barrier is not of the whole block.
BARRIER = r"^\w+ BAR\.SYNC\S* 0x1\n"
# A role is read after a barrier without a branch between them, and the next jump is the one to the role's code.
ROLE = (
    BARRIER
    + r"(?:(?!.* (?:BAR|BRA|BRX|EXIT)\b).*\n)*?"
    + r"(?P<read>\w+ LDS\.U8 .*\n)"
    + r"(?:(?!\w+ (?:BRA|EXIT)\b).*\n)*?\w+ BRX "
)
# A role begins by changing how many registers it has, and reads its arguments before the next barrier.
ARGUMENTS = r"^\w+ USETMAXREG.*\n(?P<read>(?:(?!.* (?:BAR|STSM?)\b).*\n)*)(?=" + BARRIER[1:] + ")"
LOAD = r"^(\w+) LDS\S* R\d+, \[.*?0x(\w+)\]$"
STORE = r" STS\S* \[UR\d+\+0x(\w+)\]"
WRITES = r"\b(?:STSM?|ATOMS|LDGSTS|UTMALDG|UBLKCP)\b"
READS = r"^(\w+) .*?\b(?:LDSM?|ATOMS|SYNCS|UTMASTG|UBLKCP|HGMMA)\b"


def find_shared_reads(sass: str) -> dict[int, bool]:
    """Return {offset of an instruction that reads shared memory: whether it only reads what warps hand over}.

    The first warps write a role for each of the other warps, which is a byte, and arguments that they computed. They
    wait at a barrier of the whole block, and write nothing more to shared memory until the next such barrier. Between
    the same two barriers each other warp reads its role, branches to its code and reads the arguments. The role that
    ends a warp is written and read in the same way after the last tile. So barriers order each write and read.
    Racecheck still reports them, presumably because the first warps and the others reach a barrier at different
    instructions.
    """
    found = re.findall(r"/\*(\w{4,})\*/\s+(.*?)\s*;", sass)
    listing = "".join(f"{int(offset, 16):x} {text}\n" for offset, text in found)
    handed, other = _find_written(listing)
    reads = {int(offset, 16): False for offset in re.findall(READS, listing, re.MULTILINE)}
    for match in itertools.chain(*(re.finditer(each, listing, re.MULTILINE) for each in (ROLE, ARGUMENTS))):
        for offset, address in re.findall(LOAD, match["read"], re.MULTILINE):
            near = set(range(int(address, 16), int(address, 16) + 16))  # a role's byte is that of the warp
            reads[int(offset, 16)] = bool(near & handed) and not near & other
    return reads


def _find_written(listing: str) -> tuple[set[int], set[int]]:
    """Return the addresses that are written just before two barriers without another write between them, and others."""
    handed, other = set(), set()
    parts = re.split(BARRIER, listing, flags=re.MULTILINE)
    for part, after in itertools.zip_longest(parts, parts[1:]):
        *early, last = part.split(" BAR.")
        quiet = after is not None and not re.search(WRITES, after.partition(" EXIT")[0])
        for text, addresses in (("".join(early), other), (last, handed if quiet else other)):
            addresses |= {int(address, 16) for address in re.findall(STORE, text)}
    return handed, other
