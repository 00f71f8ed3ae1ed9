"""Each part of the fp8 kernel compiles, and holds the instructions of its part and no others."""

import re

import pytest
from cases import cases
from planted import rarely

from ch14 import fp8_gemm
from ch14.fp8_gemm.configs import SQUARE
from ch14.fp8_gemm.lesson import isolated
from tilelab.runtime import build

pytestmark = pytest.mark.compile


@cases(
    "name, held, cut",
    ("loads alone", ["UTMALDG", "SYNCS.PHASECHK"], ["QGMMA"]),
    rarely("products alone", ["QGMMA"], ["UTMALDG", "SYNCS.PHASECHK"]),
    ("products and additions", ["QGMMA", "FFMA"], ["UTMALDG", "SYNCS.PHASECHK"]),
    rarely("loads and products", ["UTMALDG", "QGMMA", "SYNCS.PHASECHK"], []),
    ("epilogue alone", ["UTMASTG"], ["UTMALDG", "SYNCS.PHASECHK"]),
)
def test_a_part_holds_its_instructions(name, held, cut):
    with isolated.cut_to(name):
        made = build.build_one(fp8_gemm.job(SQUARE))
    assert made.launchable, made.reason
    assert all(each in made.sass for each in held) and not any(each in made.sass for each in cut)
    assert (len(re.findall("FFMA", made.sass)) > 100) == (name == "products and additions")
