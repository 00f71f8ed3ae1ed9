"""What a measuring process is sent: the same value on the other side, and nothing that could run."""

import json
import math

import pytest

from ch07.bulk_copy.sweep import BulkSpace
from ch10.wgmma_gemm.configs import STEPS
from ch10.wgmma_gemm.sweep import WgmmaSpace
from ch14.attention.sweep import AttentionSpace
from ch14.gemm.configs import GemmConfig
from tilelab import wire


@pytest.mark.parametrize("value", [
    None, True, 3, 0.1, math.inf, "é\n\ud800", (), [], (1, [2, (3,)], "x"), BulkSpace("axpy", 1 << 20),
    WgmmaSpace(1, 2, 3, "sm_90a"), AttentionSpace(1, 2, 3, 64, True),
    (AttentionSpace(1, 2, 3, 64), ([*STEPS.values()],)),
], ids=repr)
def test_there_and_back(value):
    assert wire.unpack(json.loads(json.dumps(wire.pack(value)))) == value


@pytest.mark.parametrize("value", [object(), {1: 2}, {1}, b"x", GemmConfig, print, 1j], ids=lambda x: type(x).__name__)
def test_what_is_not_sent(value):
    with pytest.raises(TypeError, match="a worker is sent numbers, strings, .* here is a "):
        wire.pack((1, [value]))


def test_only_dataclasses_are_made():
    with pytest.raises(TypeError, match=r"os.system is no dataclass"):
        wire.unpack({"class": ["os", "system"], "fields": {"command": "true"}})
