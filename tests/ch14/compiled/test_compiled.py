"""Workloads and modes of torch.compile, what is read out of a compilation, and the command line."""

import collections
import inspect
import json
import re
import types

import pytest
import torch
import torch.nn.functional as F
from cases import cases

from ch14.compiled.lesson import executed_instructions, experiments, reading, workloads
from ch14.compiled.lesson import worker as compiled_worker
from ch14.compiled.lesson.command import COMMAND as command
from ch14.compiled.lesson.workloads import TMA_FLAG, TUNED
from tilelab.measure import check
from tilelab.records import results
from tilelab.runtime import device, worker_pool

SHAPES = {
    "matmul": (33, 40, 24),
    "mlp": (7, 16, 24),
    "attention": (2, 4, 2, 37, 64),
    "causal attention": (1, 4, 1, 50, 128),
}


def make(family, dtype=torch.float32):
    return workloads.make_workload(family, SHAPES[family], where="cpu", dtype=dtype)


def test_specs_are_what_another_formula_says():
    a, b = (work := make("matmul")).inputs()
    assert torch.allclose(work.spec(a, b), torch.einsum("mk,kn->mn", a.double(), b.double()))
    (x,) = (work := make("mlp")).inputs()
    gate, up, down = (weight.double() for weight in (work.module.gate, work.module.up, work.module.down))
    row = x[3].double()
    assert torch.allclose(work.spec(x)[3], down @ ((gate @ row) / (1 + torch.exp(-gate @ row)) * (up @ row)))
    for family in ("attention", "causal attention"):
        work = make(family)
        q, k, v = (tensor.double() for tensor in work.inputs())
        keys, values = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        known = F.scaled_dot_product_attention(q, keys, values, is_causal=work.causal)
        assert torch.allclose(work.spec(q, k, v), known)


@cases(
    "family, modes",
    ("matmul", ["eager"]),
    ("mlp", ["eager"]),
    ("attention", ["eager", "unfused", "flash", "math"]),
    ("causal attention", ["eager", "unfused", "flash", "math"]),
)
def test_modes_mean_the_spec(family, modes):
    work = make(family)
    inputs = work.inputs()
    for mode in modes:
        result = workloads.prepare(work, mode)(*inputs)
        assert result.shape == work.spec(*inputs).shape
        assert check.relative_error(result, work.spec(*inputs)) < 1e-5, mode


@pytest.mark.gpu
def test_course_attention_is_a_mode():
    work = workloads.make_workload("causal attention", (2, 4, 2, 300, 64))
    inputs = work.inputs()
    function = workloads.prepare(work, "course")
    assert check.relative_error(function(*inputs), work.spec(*inputs)) < 0.01


def test_flops_count_a_product_a_causal_half_and_three_products():
    assert make("matmul").flops == 2 * 33 * 40 * 24 and make("mlp").flops == 6 * 7 * 16 * 24
    assert make("attention").flops == 4 * 2 * 4 * 37**2 * 64
    assert make("causal attention").flops == 2 * 4 * 50**2 * 128


def test_inputs_are_fresh():
    work = make("matmul")
    assert not torch.equal(work.inputs()[0], work.inputs()[0])


def test_bad_workload_is_one_sentence():
    says = "HK must divide H, and D be 64 or 128; the shape is"
    for family, shape, message in (
        ("conv", (1,), "unknown workload 'conv'; choose matmul, mlp, attention, causal attention."),
        ("matmul", (4096, 4096), "a shape of matmul is M,N,K, each from 1 to 2^20; it is 4096,4096."),
        ("mlp", (0, 1, 1), "a shape of mlp is T,HIDDEN,INNER, each from 1 to 2^20; it is 0,1,1."),
        ("attention", (1, 4, 3, 8, 64), f"{says} (1, 4, 3, 8, 64)."),
        ("attention", (1, 4, 2, 8, 80), f"{says} (1, 4, 2, 8, 80)."),
    ):
        with pytest.raises(ValueError) as error:
            workloads.make_workload(family, shape, where="meta")
        assert str(error.value) == message


def test_bad_mode_names_those_there_are():
    with pytest.raises(ValueError, match="unknown mode 'flash' of mlp; choose eager, default, max-autotune"):
        workloads.prepare(make("mlp"), "flash")
    with pytest.raises(ValueError, match="unknown mode 'fast' of attention; choose .*math"):
        workloads.prepare(make("attention"), "fast")


@pytest.mark.compile
def test_no_mode_of_torch_sets_the_descriptor_flag_and_torch_knows_every_option():
    from torch._inductor import config, list_mode_options

    assert config.triton.enable_persistent_tma_matmul is False
    assert not any(TMA_FLAG in options for options in list_mode_options().values())
    found = workloads.compile_arguments("persistent-tma")
    assert found == {"options": {**list_mode_options(TUNED), TMA_FLAG: True}}
    assert workloads.compile_arguments("default") == {}
    assert workloads.compile_arguments("max-autotune") == {"mode": "max-autotune"}
    for mode in workloads.COMPILED:  # RuntimeError for an option that torch does not have
        torch.compile(torch.matmul, **workloads.compile_arguments(mode))


@pytest.mark.compile
def test_a_filter_of_candidates_matches_inductors_names():
    from torch._inductor.kernel import mm

    names = [f"triton_{template.name}_7" for template in (mm.mm_template, mm.persistent_tma_mm_template)]
    assert [reading.describe_choice(name) for name in names] == ["Triton, pointers", "Triton, persistent TMA"]
    for mode, kept in (("pointers-only", names[:1]), ("tma-only", names[1:])):
        pattern = workloads.COMPILED[mode]["options"][workloads.CANDIDATE_FILTER]
        assert [name for name in names if re.search(pattern, name)] == kept


@pytest.mark.compile
def test_gb10_is_offered_no_triton_product():
    from torch._inductor.utils import is_big_gpu

    assert "68" in inspect.getsource(is_big_gpu)
    assert [workloads.offers_triton_gemm(sms) for sms in (48, 67, 68, 132)] == [False, False, True, True]


def test_pointwise_bytes():
    sizes = workloads.pointwise_bytes(8192, 14336)
    g = 8192 * 14336 * 2
    assert list(sizes.values()) == [5 * g, 3 * g, g]


PROGRAM = '''
async_compile.triton('triton_tem_fused_mm_0', """
    a_desc = triton.language.make_tensor_descriptor(base=A, shape=[M, K])
    b_desc = triton.language.make_tensor_descriptor(base=B, shape=[K, N])
""")
def partition_0(args):
    triton_tem_fused_mm_0.run(arg0_1, arg1_1, buf0, workspace_0, 132, 1, 1, stream=stream0)
    extern_kernels.mm(buf0, arg2_1, out=buf1)
class Runner:
    def call(self, args):
        (buf1,) = self.partitions[0](partition0_args)
        buf2 = torch.ops.aten._scaled_dot_product_flash_attention.default(arg3_1, arg4_1, arg5_1, 0.0, False)
        buf3 = buf2[0]
        cpp_fused_mul_silu_1(buf3, buf4)
        return (buf4, )
'''


def test_calls_and_descriptors_of_a_generated_program():
    found = reading.list_calls(PROGRAM)
    assert found == ["triton_tem_fused_mm_0", "library mm", "library flash attention", "cpp_fused_mul_silu_1"]
    assert len(reading.DESCRIPTOR.findall(PROGRAM)) == 2 and reading.list_calls("") == []


@cases(
    "name, wanted",
    ("void at::cuda::(anonymous namespace)::spin_kernel(long)", reading.MARK),
    ("cuda::<unnamed>::spin_kernel(long)", reading.MARK),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"),
    (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>, false>(pytorch_flash::Params)",
        "flash_fwd_kernel",
    ),
    (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::X<2> >(int)",
        "multi_tensor_apply_kernel",
    ),
    ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ("triton_tem_fused_mm_0", "triton_tem_fused_mm_0"),
)
def test_short_names(name, wanted):
    assert reading.shorten_name(name) == wanted


@pytest.mark.compile
def test_inductors_feedback_becomes_rows_in_order_of_speed():
    """Called as torch._inductor.select_algorithm calls a feedback saver, after each decision."""
    from torch._inductor import select_algorithm

    choice = collections.namedtuple("choice", "name description")
    nodes = [types.SimpleNamespace(get_size=lambda size=size: size) for size in ([64, 32], [32, 16])]
    mm = choice("mm", "")
    slow = choice("triton_mm_3", "BLOCK_M=64")
    dead = choice("triton_mm_persistent_tma_5", "BLOCK_M=256")
    with reading.record_decisions() as decided:
        (saver,) = select_algorithm.get_algorithm_selector_cache().feedback_saver_fns
        saver({dead: float("inf"), slow: 0.2, mm: 0.1}, "mm", nodes, [mm, slow, dead], None, {})
    found = [(row["choice"], row["ms"]) for row in decided]
    assert found == [("mm", 0.1), ("triton_mm_3", 0.2), (dead.name, None)]
    assert decided[0]["operands"] == [[64, 32], [32, 16]]
    assert reading.find_winners(decided) == ["library (mm)"]
    assert not select_algorithm.get_algorithm_selector_cache().feedback_saver_fns


# As ncu said on an H200, most columns and opcodes left out; a field with one value per line of the kernel is long.
SAID = """==PROF== Connected to process 2086 (/usr/bin/python3.12)
"ID","Kernel Name","Grid Size","sass__inst_executed_per_opcode","inst_executed"
"","","","inst","inst"
"0","cuda::<unnamed>::spin_kernel(long)","(1, 1, 1)","13 (ISETP: 4; LDC: 2; EXIT: 2; CS2R: 2; BRA: 1)","13 (32: 1)"
"1","nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT","(2, 66, 1)","16,917,092 (UIADD3: 6,924,254; OTHERS)","LONG"
"2","cuda::<unnamed>::spin_kernel(long)","(1, 1, 1)","13 (ISETP: 4; LDC: 2; EXIT: 2; CS2R: 2; BRA: 1)","13 (32: 1)"
""".replace("LONG", "1 (32: 1); " * 20_000).replace(
    "OTHERS", "HGMMA: 2,097,152; UTMALDG: 163,840; UTMASTG: 32,768"
)


def test_ncu_counters():
    rows = reading.parse_counters(SAID)
    expected = {"kernel": "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "UTMALDG": 163840}
    expected |= {"UTMASTG": 32768, "instructions": 6924254 + 2097152 + 163840 + 32768, "LDGSTS": 0}
    expected |= {"HGMMA": 2097152}
    assert rows[1] == expected
    assert [[row["UTMALDG"] for row in call] for call in reading.split_at_marks(rows)] == [[163840], []]
    with pytest.raises(ValueError, match="no column"):
        reading.parse_counters("==ERROR== no kernels were profiled")
    with pytest.raises(ValueError, match="no instances"):
        reading.parse_counters(SAID.replace("13 (ISETP: 4; LDC: 2; EXIT: 2; CS2R: 2; BRA: 1)", "13"))
    with pytest.raises(ValueError, match=r"ncu saw 2 calls of \d+"):
        executed_instructions.group_by_call(rows)


def test_every_call_under_ncu_is_a_case():
    cases = {(family, shape): modes for family, shape, modes in experiments.CASES}
    for family, shape, modes in executed_instructions.CALLS:
        assert set(modes) <= set(cases[family, shape])
    for family, shape, modes in experiments.CASES:
        for mode in modes:
            workloads.check_mode(workloads.make_workload(family, shape, where="meta"), mode)
        assert "eager" in modes or family.endswith("attention")


ROW = {
    "workload": "matmul",
    "shape": [1, 1, 1],
    "name": "default",
    "triton": {"triton_poi_0": dict.fromkeys(experiments.COUNTED, 0)},
    "winner": [],
    "kernels": [
        {"kernel": name, "us": us}
        for name, us in (("nvjet", 5.0), ("triton_poi_0", 6.0), ("nvjet", 5.0), ("Memset", 0.1))
    ],
}


def test_no_kernel_claims_tma_without_a_count():
    main, pointwise, _ = experiments.list_kernels(ROW, [])
    expected = {"kernel": "nvjet", "us": 10, "share": 10 / 16.1, "UTMALDG": None, "UTMASTG": None}
    expected |= {"LDGSTS": None, "proof": "none"}
    assert main == expected
    assert (pointwise["kernel"], pointwise["UTMALDG"], pointwise["proof"]) == ("triton_poi_0", 0, "SASS")
    counted = {"workload": "matmul", "shape": [1, 1, 1], "kernel": "nvjet", "UTMALDG": 8, "UTMASTG": 2}
    counted |= {"LDGSTS": 0}
    assert experiments.list_kernels(ROW, [counted])[0]["proof"] == "ncu"
    assert experiments.list_kernels(ROW, [counted | {"shape": [2, 2, 2]}])[0]["proof"] == "none"
    own = ROW | {"triton": {"nvjet": {"UTMALDG": 2, "UTMASTG": 0, "LDGSTS": 0}}}
    assert experiments.list_kernels(own, [counted])[0]["UTMALDG"] == 2
    assert experiments.list_kernels({"workload": "matmul", "shape": []}, []) == []  # a mode that failed


def test_tables_of_kernels():
    failed = {"workload": "matmul", "shape": [1, 1, 1], "name": "tma-only", "status": "failed"}
    made = experiments.make_table([ROW, failed], [])
    found = [(row["winner"], row["main"], row["proof"]) for row in made]
    assert found == [("nothing to choose", "nvjet", "none"), ("", "", "none")]


@pytest.fixture(scope="module")
def compile_here():
    """A function that compiles and checks modes of a workload, in one process for all tests.

    Inductor does not pad matrices here: it decides that by timing, so it would depend on what else uses the GPU.
    """

    def compile_modes(family, shape, modes):
        rows = compiled_worker.measure_modes(
            worker, family, shape, modes, workloads.device_here(), timed=False
        )
        if any(row["status"] == "unsupported" for row in rows):
            pytest.skip(rows[-1]["reason"])
        return {row["name"]: row for row in rows}

    # Two kernels are compiled by g++: to compile their headers in advance would take longer.
    options = {"TORCHINDUCTOR_SHAPE_PADDING": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    with worker_pool.lease_worker(compiled_worker.MODULE, compiled_worker.WHAT, **options) as worker:
        yield compile_modes
        worker.stop()


def test_a_mode_whose_candidates_were_timed_has_no_compile_time():
    """Its caches are the other's; which mode comes first is the caller's choice."""
    asked = []
    answers = types.SimpleNamespace(
        ask=lambda request, _: asked.append(request) or {"status": "ok", "compile_s": 1.0}
    )
    modes = ("eager", "persistent-tma", "max-autotune", TUNED, "default")
    rows = compiled_worker.measure_modes(answers, "mlp", (1, 8, 8), modes, timed=False)
    expected = [("eager", None, True), ("persistent-tma", "persistent-tma", True)]
    expected += [("max-autotune", "persistent-tma", False), (TUNED, "persistent-tma", False)]
    expected += [("default", "default", True)]
    assert [(row["name"], row.get("caches"), "compile_s" in row) for row in rows] == expected
    found = [request["folder"].rsplit("/", 1)[1] for request in asked]
    assert found == ["eager", "persistent-tma", "persistent-tma", "persistent-tma", "default"]
    alone = compiled_worker.measure_modes(answers, "mlp", (1, 8, 8), ("max-autotune", TUNED), timed=False)
    assert [row["caches"] for row in alone] == ["max-autotune", "max-autotune"]


@pytest.mark.compile
def test_modules_of_graphs_and_of_fusions_that_were_only_timed(monkeypatch):
    from torch._inductor.codecache import PyCodeCache

    graph = types.SimpleNamespace(call=1)
    fusion = types.SimpleNamespace(call=1, benchmark_all_configs=1)
    other = types.SimpleNamespace()
    monkeypatch.setattr(PyCodeCache, "modules", [fusion, other, graph])
    assert reading.find_modules() == ([graph], [fusion])


@pytest.mark.compile
def test_compiles_and_reads_an_mlp(compile_here):
    eager, default, wrong = compile_here("mlp", (37, 40, 72), ("eager", "default", "flash")).values()
    assert eager["status"] == default["status"] == "ok" and 0 < default["error"] <= default["tolerance"]
    kernel = "triton_poi_fused_mul_silu_0" if device.current().capability else "cpp_fused_mul_silu_0"
    assert default["calls"] == ["library mm", "library mm", kernel, "library mm"]
    assert default["descriptors"] == 0
    assert default["compile_s"] > 0 and "compile_s" not in eager and default["winner"] == []
    assert default["fusions_timed"] == 0 and default["caches"] == "default"
    assert wrong["status"] == "failed" and "unknown mode" in wrong["reason"]


@pytest.mark.compile
def test_unfused_attention_is_recognised(compile_here):
    """Inductor puts the fused operation where three lines of plain torch stood."""
    unfused, default = compile_here("attention", (1, 2, 2, 96, 64), ("unfused", "unfused-default")).values()
    assert unfused["status"] == default["status"] == "ok"
    assert any("attention" in call for call in default["calls"])


@pytest.mark.gpu
def test_command_line_measures(capsys):
    assert command.main(["--shape", "1024,1024,1024", "--mode", "default", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(results.KEYS) <= set(record)
    assert [row["name"] for row in record["rows"]] == ["eager", "default"]
    assert all(row["status"] == "ok" and row["ms"] > 0 and row["kernels"] for row in record["rows"])


# ---- on a GPU: the templates themselves


@pytest.mark.gpu
def test_the_descriptor_template_is_offered_and_holds_tma(compile_here):
    rows = compile_here("matmul", (1000, 1024, 520), ("eager", "persistent-tma", "tma-only", "pointers-only"))
    assert all(row["status"] == "ok" for row in rows.values()), [row.get("reason") for row in rows.values()]
    kinds = {reading.describe_choice(each["choice"]) for each in rows["persistent-tma"]["decided"]}
    assert {"library (mm)", "Triton, pointers", "Triton, persistent TMA"} <= kinds
    tma, pointers = (list(rows[mode]["triton"].values())[0] for mode in ("tma-only", "pointers-only"))
    assert rows["tma-only"]["descriptors"] >= 2 and tma["UTMALDG"] >= 2 and tma["LDGSTS"] == 0
    assert rows["pointers-only"]["descriptors"] == pointers["UTMALDG"] == 0 and pointers["LDGSTS"] > 0


@pytest.mark.gpu
def test_rows_off_the_16_byte_grid_get_no_descriptor_template(compile_here):
    row = compile_here("matmul", (512, 1001, 520), ("persistent-tma",))["persistent-tma"]
    assert row["status"] == "ok", row["reason"]
    found = "Triton, persistent TMA"
    assert found not in {reading.describe_choice(each["choice"]) for each in row["decided"]}


@pytest.mark.gpu
def test_flex_attention_has_tma_only_when_asked(compile_here):
    rows = compile_here("causal attention", (1, 4, 2, 300, 64), ("flex", "flex-tma"))
    assert all(row["status"] == "ok" for row in rows.values()), [row.get("reason") for row in rows.values()]
    counts = {
        mode: max(kernel["UTMALDG"] for kernel in rows[mode]["triton"].values())
        for mode in ("flex", "flex-tma")
    }
    assert counts["flex"] == 0 < counts["flex-tma"]
