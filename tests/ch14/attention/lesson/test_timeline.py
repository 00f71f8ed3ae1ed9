"""The recorder of the attention kernel: its scopes compile, and the trace of Proton becomes a recording."""

import statistics

import pytest
from pythons import run_python

from ch14.attention.lesson import timeline as recorder
from tilelab.records import results, timeline
from tilelab.runtime import device

BLOCKS = 4
# Compile in a process of its own, because Proton's passes stay registered. The hook itself asks for a GPU.
COMPILE = """
import re
import triton
import triton.profiler.language
from triton._C.libtriton import passes, proton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.profiler import mode as modes
from triton.profiler.flags import flags
from triton.profiler.hooks.instrumentation import Instrumentation, _interpret_mode
from ch14 import attention
from ch14.attention import hopper_kernel
from ch14.attention.lesson import timeline

mode = _interpret_mode(timeline.MODE)
flags.instrumentation_on = True

def to_llvm_ir(pm):
    proton.add_convert_proton_to_protongpu(
        pm, mode.metric_type, mode.sampling_strategy, mode.sampling_options, mode.granularity, mode.buffer_strategy,
        mode.buffer_type, mode.buffer_size, 232448, 1, 128, modes.Optimize.CLOCK32 not in mode.optimizations)
    passes.common.add_cse(pm)
    proton.add_allocate_proton_shared_memory(pm)

def to_llvm(pm):
    proton.add_allocate_proton_global_scratch_buffer(pm)
    proton.add_convert_proton_nvidia_gpu_to_llvm(pm)

backends["nvidia"].compiler.instrumentation = Instrumentation(
    {"ttgpuir_to_llvmir": to_llvm_ir, "llvmir_to_llvm": to_llvm})
kernel, job = hopper_kernel.attention_hopper_kernel, attention.job(timeline.CONFIG, "sm_90a")
signature = {name: job.signature.get(name, "constexpr") for name in kernel.arg_names}
constants = job.constants | {"Q_STAGES": 1}  # as timeline.launch
binary = triton.compile(GluonASTSource(kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32),
                        options={"num_warps": job.num_warps, "instrumentation_mode": str(mode)})
names = sorted(set(re.findall(r'proton.record start "([^"]+)"', binary.asm["source"])))
ended = sorted(set(re.findall(r'proton.record end "([^"]+)"', binary.asm["source"])))
assert names == ended
assert binary.metadata.profile_scratch_size >= len(timeline.ROLES) * 512 * 8  # bytes of stamps
print(binary.metadata.shared, len(re.findall("%clock", binary.asm["ptx"])), ", ".join(names))
"""


def make_trace(zero=5.0, cta=3):
    """A trace as Proton writes it, of two tiles of four blocks: times in microseconds of a clock of 1 GHz."""
    events = []

    def add(warp, name, begin, cycles, number=cta):
        event = {"ph": "X", "name": name, "cat": "kernel", "pid": f"kernel Core7 CTA{number} [clock cycle]"}
        event |= {"tid": f"warp {warp} (line 0)", "ts": zero + begin / 1000, "dur": cycles / 1000, "args": {}}
        events.append(event)

    for tile in range(2):
        start = 5000 * tile
        for group in range(2):
            add(8, "wait q empty", start + 20 * group, 10)
            add(8, "load q", start + 10 + 20 * group, 10)
        for block in range(BLOCKS):
            at = start + 40 + 900 * block
            for number, what in enumerate("kv"):
                add(8, f"wait {what} empty", at + 80 * number, 50)
                add(8, f"load {what}", at + 50 + 80 * number, 20)
        for warp in (0, 4):
            at = start + 700
            add(warp, "wait q full", at, 5)
            for block in range(BLOCKS):
                add(warp, "wait k full", at + 10 + 900 * block, 30)
                add(warp, "product k", at + 40 + 900 * block, 700)
                add(warp, "wait v full", at + 750 + 900 * block, 10)
                add(warp, "product v", at + 760 + 900 * block, 800)
            add(warp, "store", at + 900 * BLOCKS + 700, 200)
    add(0, "product k", 0, 1, number=cta + 132)  # another CTA
    return {"displayTimeUnit": "ns", "traceEvents": [{"ph": "M", "name": "process_name"}, *events[::-1]]}


def test_the_trace_of_one_cta_becomes_a_recording():
    recording = recorder.read_trace(make_trace(), gpu="a GPU", date="2026-11-23")
    assert recording["lanes"] == ["producer", "consumer 0", "consumer 1"]
    assert recording["stage_names"] == ["K 0", "K 1", "V 0", "V 1", "Q"] and recording["stages"] == 5
    rows = timeline.as_rows(recording)
    loads = [(row["tile"], row["step"], row["stage"], row["phase"]) for row in rows if row["kind"] == "load"]
    expected = [(0, None, 4, 0), (0, None, 4, 0), (0, 0, 0, 0), (0, 0, 2, 0), (0, 1, 1, 0), (0, 1, 3, 0)]
    expected += [(0, 2, 0, 1), (0, 2, 2, 1)]
    assert loads[:8] == expected
    assert loads[10:12] == [(1, None, 4, 1), (1, None, 4, 1)]
    products = [row for row in rows if (row["lane"], row["kind"]) == ("consumer 1", "product")]
    found = [(row["tile"], row["step"]) for row in products]
    assert found == [(tile, block) for tile in range(2) for block in range(BLOCKS) for _ in "kv"]
    assert products[0]["end"] - products[0]["begin"] == 700 and rows[0]["begin"] == 0
    waits = [row for row in rows if row["barrier"] == "empty" and row["stage"] == 0]
    assert [row["phase"] for row in waits] == [1, 0, 1, 0]


def test_the_stages_of_k_and_v_fill_and_empty():
    fills = recorder.read_trace(make_trace())["fills"]
    known = [fill for fill in fills if fill[0] < 4]
    assert len(known) == 2 * 2 * BLOCKS and all(fill[4] <= fill[5] <= fill[6] <= fill[7] for fill in known)


def test_a_block_takes_the_time_between_two_products_of_one_tile():
    recording = recorder.read_trace(make_trace())
    assert recorder.find_block_cycles(recording) == 900
    picture = recorder.draw_still(recording, "made up")
    assert "under P V" in picture.get_suptitle()
    assert "5,000 to 5,200 (consumer 0)" in picture.description
    assert picture.description.endswith("loads from 5,010, products from 5,740.")


def test_a_softmax_reaches_from_its_scores_to_the_next_wait_and_lies_over_a_product_with_v():
    recording = results.load_record("ch14_attention_timeline", recorder.source()).rows[0]["recording"]
    rows, found = timeline.as_rows(recording), recorder.find_softmax(recording)
    assert len(found) == 2 * 2 * 16  # consumers, tiles, blocks
    for row in found:
        others = [each for each in rows if each["lane"] == row["lane"] and each["begin"] < row["end"]]
        assert not any(each["kind"] == "wait" and each["end"] > row["begin"] for each in others)
        last = [each for each in others if each["kind"] == "product" and each["end"] > row["begin"]]
        assert len(last) == (row["step"] > 0) and all(each["step"] == row["step"] - 1 for each in last)


def test_the_record_shows_what_the_notebook_says():
    recording = results.load_record("ch14_attention_timeline", recorder.source()).rows[0]["recording"]
    rows = timeline.as_rows(recording)
    products = {
        (row["lane"], row["tile"], row["step"], row["stage"] >= 2): row
        for row in rows
        if row["kind"] == "product"
    }
    for lane, tile, step, is_v in products:
        if step and not is_v:  # Q K^T is issued before P V of the block before, and ends first
            scores, last = products[lane, tile, step, False], products[lane, tile, step - 1, True]
            assert scores["begin"] < last["begin"] < scores["end"] < last["end"]
    # in the middle of a tile, a product of one consumer or the other is always in flight
    for tile in range(2):
        covered, end = (products["consumer 0", tile, step, False]["begin"] for step in (3, 14))
        for row in sorted(products.values(), key=lambda row: row["begin"]):
            assert row["begin"] <= covered or covered >= end
            covered = max(covered, row["end"])
    stores = [row for row in rows if row["kind"] == "store"]
    assert {row["lane"] for row in stores} == {"consumer 0", "consumer 1"}
    assert any(  # while a consumer stores, the producer loads for the next tile
        row["kind"] == "load" and row["tile"] == 1 and store["begin"] < row["begin"] < store["end"]
        for row in rows
        for store in stores
        if store["tile"] == 0
    )
    # the stage of the next tile's first K is empty before the producer waits for Q, but K is loaded after Q
    loads = [row for row in rows if (row["kind"], row["tile"]) == ("load", 1)]
    waits = [row for row in rows if row["kind"] == "wait" and row["barrier"] == "empty" and row["tile"] == 1]
    assert [row["stage"] for row in loads[:3]] == [4, 4, 0] == [row["stage"] for row in waits[:3]]
    emptied = max(products[lane, 0, 14, False]["end"] for lane in ("consumer 0", "consumer 1"))
    assert emptied < waits[0]["begin"] and waits[1]["end"] < loads[2]["begin"]
    for lane in ("consumer 0", "consumer 1"):  # they wait for this K after Q has landed
        q, k = [r for r in rows if (r["lane"], r["kind"], r["tile"]) == (lane, "wait", 1)][:2]
        assert (q["stage"], k["stage"]) == (4, 0) and q["end"] - q["begin"] < k["end"] - k["begin"]
    assert recorder.find_block_cycles(recording) > 4 * recorder.PRODUCT_CYCLES
    waits = {
        lane: [
            row["end"] - row["begin"]
            for row in rows
            if (row["lane"], row["kind"]) == (lane, "wait") and (lane != "producer" or row["stage"] == 0)
        ]
        for lane in recording["lanes"]
    }
    scope = waits.pop("producer")[0]  # the first wait for K finds its stage empty
    # most waits are short beside a product, and the start and the scopes are most of the waiting
    for lane, each in waits.items():
        start = sum(
            row["end"] - row["begin"]
            for row in rows
            if (row["lane"], row["kind"]) == (lane, "wait")
            and row["end"] <= products[lane, 0, 0, False]["begin"]
        )
        assert (
            statistics.median(each) < recorder.PRODUCT_CYCLES / 2
            and start + len(each) * scope > sum(each) / 2
        )


def test_a_trace_without_scopes_is_refused():
    with pytest.raises(ValueError, match="no event of load, wait, product, store"):
        recorder.read_trace(
            {"traceEvents": [{"ph": "X", "name": "kernel", "pid": "", "tid": "", "ts": 0, "dur": 1}]}
        )
    trace = make_trace()
    late = [event for event in trace["traceEvents"] if event.get("name") not in ("wait q full", "store")]
    with pytest.raises(ValueError, match="has dropped the first events of the consumer"):
        recorder.read_trace({"traceEvents": late})
    trace["traceEvents"][2]["tid"] = "warp 2 (line 0)"
    with pytest.raises(ValueError, match="the roles are those of"):
        recorder.read_trace(trace)


@pytest.mark.compile
def test_the_kernel_with_scopes_compiles_with_protons_passes(tmp_path):
    done = run_python("-c", COMPILE, limit_s=400, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    shared, clocks, names = done.stdout.strip().split(maxsplit=2)
    assert int(shared) <= 232448 and int(clocks) >= 40
    assert names.split(", ") == sorted(
        [f"load {tile}" for tile in "qkv"]
        + [f"wait {tile} {barrier}" for tile in "qkv" for barrier in ("empty", "full")]
        + ["product k", "product v", "store"]
    )


@pytest.mark.skipif(device.current().has_wgmma, reason="this GPU can record")
def test_without_a_hopper_gpu_the_command_shows_its_record(capsys):
    assert recorder.main([]) == 0
    said = capsys.readouterr().out
    assert "needs a Hopper GPU" in said and "consumer" in said
