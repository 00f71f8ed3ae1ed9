"""The rows of the host time: every operator, checked, with its parts."""

import ast

import pretended_gpu
import pytest
import torch

from ch14.compiled.lesson import host_time
from tilelab.runtime import device

PRETENDED = """
import torch
from ch14.compiled.lesson import host_time
from tilelab.runtime import cuda


def call_once(calls, *_):
    return {name: [call(), 1.0][1] for name, call in calls.items()}


cuda.load_kernel = lambda *_: cuda.load_cubin(bytes(64), "any")
torch._scaled_mm = lambda *_, **__: None
host_time.WHERE, host_time.SIZE, host_time.measure_enqueue_us = "cpu", 128, call_once
print(host_time.measure_host_time.__wrapped__())
"""
PARTS = ("traced_us", "find_us", "allocate_us", "launch_us", "moved_us")


@pytest.mark.compile
@pytest.mark.skipif(not pretended_gpu.COMPILER, reason="needs a C compiler")
def test_every_operator_has_a_row_with_its_parts():
    rows = ast.literal_eval(pretended_gpu.run(PRETENDED).replace("inf", "1e999").replace("nan", "1e999"))
    assert len({row["name"] for row in rows}) == len(rows) == 14
    assert {row["peer"] for row in rows} == {"torch.mm", "SDPA", "torch._scaled_mm, one scale", "copy_"}
    for row in rows:
        assert row["us"] == row["peer_us"] == row["ratio"] == 1 and row["spread"] == 0
        assert all(part in row for part in PARTS) == ("ops" not in row["name"]), row["name"]


@pytest.mark.gpu
def test_every_call_is_right_on_the_gpu():
    device.require("has_tma", "this test", "run it elsewhere")
    with torch.no_grad():
        for make in (host_time.make_bf16_cases, host_time.make_product_cases, host_time.make_pass_cases):
            for case in make():
                case.peer_call()
                assert host_time.check_case(case)["status"] == "ok", case.name
