"""Which reads of shared memory count as handed over by barriers, in short listings like those of the kernels."""

import types

from cases import cases

from ch14.attention.lesson import experiments, races
from tilelab.runtime import device

# Two roles in the order in which the compiler lays them out: what waits for a role, a loader, and the first warps.
LISTING = """
    BAR.SYNC.DEFER_BLOCKING 0x1 ; S2UR UR5, SR_CgaCtaId ; LDS.U8 R2, [R2+UR7+0x2812c] ; ISETP.GT.U32 P0, R2, 0x4
    @P0 BAR.SYNC.DEFER_BLOCKING 0x1 ; @P0 BRA 0x0 ; LDC R2, c[0x2][R4] ; BRX R2 -0x190
    USETMAXREG.DEALLOC.CTAPOOL 0x18 ; LDS.64 R2, [UR5+0x28000] ; R2UR UR6, R3 ; BAR.SYNC.DEFER_BLOCKING 0x1
    LDS.64 R4, [UR5+0x28000] ; BAR.SYNC.DEFER_BLOCKING 0x1 ; BRA 0x0
    STS.64 [UR9+0x28130], R14 ; STS.64 [UR9+0x28000], R10 ; BAR.SYNC.DEFER_BLOCKING 0x1 ; NOP
    BAR.SYNC.DEFER_BLOCKING 0x1 ; STS.128 [R18+0x24000], R32 ; BAR.SYNC.DEFER_BLOCKING 0x2, 0x80
    BAR.SYNC.DEFER_BLOCKING 0x1 ; STS.64 [UR4+0x28130], R2 ; BAR.SYNC.DEFER_BLOCKING 0x1 ; EXIT
"""


def list_sass(text: str) -> str:
    """Return the instructions as cuobjdump lists them, with their offsets and encodings."""
    found = [each.strip() for line in text.strip().splitlines() for each in line.split(" ; ")]
    return "".join(
        f"        /*{16 * at:04x}*/                   {each} ;  /* 0x000fe20000000f00 */\n"
        for at, each in enumerate(found)
    )


ROLE, ARGUMENTS, LATER = 0x20, 0x90, 0xC0


def test_a_role_and_arguments_are_handed_over():
    assert races.find_shared_reads(list_sass(LISTING)) == {ROLE: True, ARGUMENTS: True, LATER: False}


@cases(
    "old, new, still",
    # The first warps do not wait, or only half of the block does.
    ("R10 ; BAR.SYNC.DEFER_BLOCKING 0x1 ;", "R10 ; NOP ;", set()),
    ("R10 ; BAR.SYNC.DEFER_BLOCKING 0x1 ;", "R10 ; BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;", set()),
    # They write while the others read.
    ("0x1 ; NOP", "0x1 ; STS.128 [R18], R32", set()),
    # The role that ends a warp is written without a barrier behind it.
    ("R2 ; BAR.SYNC.DEFER_BLOCKING 0x1 ; EXIT", "R2 ; NOP ; EXIT", {ARGUMENTS}),
    # A read before the barrier, of another address, or after the tile has begun.
    ("BAR.SYNC.DEFER_BLOCKING 0x1 ; S2UR UR5, SR_CgaCtaId ;", "NOP ; NOP ;", {ARGUMENTS}),
    ("R2, [UR5+0x28000]", "R2, [UR5+0x24000]", {ROLE}),
    ("0x18 ; LDS", "0x18 ; BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ; LDS", {ROLE}),
)
def test_other_reads_are_not(old, new, still):
    assert LISTING.count(old) == 1
    found = races.find_shared_reads(list_sass(LISTING.replace(old, new)))
    assert {offset for offset, handed in found.items() if handed} == still


@cases(
    "places, status",
    (["attention_hopper_kernel+0x20", "attention_hopper_kernel+0x90"], "ok"),
    (["attention_hopper_kernel+0x20", "attention_hopper_kernel+0xc0"], "wrong"),
    (["attention_hopper_kernel+0x30"], "wrong"),  # reads no shared memory
    (["attention_split_hopper_kernel+0x20"], "wrong"),
)
def test_a_row_is_right_if_all_of_its_races_are_handed_over(monkeypatch, places, status):
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a", 132))
    job = types.SimpleNamespace(kernel="ch14.attention.hopper_kernel:attention_hopper_kernel")
    report = types.SimpleNamespace(job=job, sass=list_sass(LISTING))
    monkeypatch.setattr(experiments.build, "build", lambda jobs: [report])
    reason = "Error: Race reported between one: RACECHECK SUMMARY: 2 hazards displayed"
    row = {"tool": "racecheck", "status": "wrong", "reason": reason}
    row["races"] = [f"Read access at {place}" for place in places]
    (judged,) = experiments.judge_races([row])
    assert judged["status"] == status and judged["reason"].startswith("2 hazards") == (status == "ok")
