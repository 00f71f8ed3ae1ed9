"""The programs that Inductor writes for an H200 on any machine, and sixteen functions that it compiled both ways."""

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ch14.compiled.lesson import exercises, experiments, generated, pointwise, process

DESCRIPTORS = generated.as_keywords(generated.DESCRIPTORS)


def gated(g, u):
    return F.silu(g) * u


def product(a, b):
    return a @ b


def unknown(g):
    return g.no_such_method()


@pytest.mark.compile
def test_a_pointwise_kernel_by_pointers_and_by_descriptors():
    for options, descriptors, loads in (({}, 0, 0), (DESCRIPTORS, 3, 2)):
        program = generated.generate(gated, (256, 1024), (256, 1024), **options)
        assert program.calls == ["triton_poi_fused_mul_silu_0"] and program.descriptors == descriptors
        report = program.compile(program.calls[0], XBLOCK=1024)
        assert report.status == "ok" and report.counts["tma_load"] == loads
        assert ".run(" in program.body() and bool(program.find_lines("descriptor")) == bool(options)


def test_the_listing_says_where_every_buffer_comes_from():
    kept = [
        "buf1 = torch.ops.lesson.f.default(arg0_1)",
        "buf2 = buf1",
        "assert_size_stride(buf2, 'torch.ops.lesson.f')",
        "buf3 = buf2; del buf2  # reuse",
    ]
    lines = ["args.clear()", *kept[:3], "assert_alignment(buf2, 16, 'torch.ops.lesson.f')", "del buf1"]
    lines += [kept[3]]
    program = generated.Program("\n    ".join(["def call(self, args):", *lines, "return (buf3, )"]))
    assert program.body().splitlines() == kept


@triton.jit
def double(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at))


def launch_double(x):
    x, out = x + 1, torch.empty_like(x)
    double[(x.numel() // 1024,)](x, out, BLOCK=1024)
    return out


@pytest.mark.compile
def test_a_plain_launch_of_a_triton_kernel_stays_in_the_graph():
    assert "double_0.run(" in generated.generate(launch_double, (64, 64)).body()


@pytest.mark.compile
def test_the_template_wants_the_flag_and_aligned_rows():
    options = generated.as_keywords(generated.TEMPLATE_OPTIONS) | {
        "triton__enable_persistent_tma_matmul": True
    }
    program = generated.generate(product, (512, 512), (512, 512), wanted="persistent_tma", **options)
    assert "Triton, persistent TMA" in program.describe_candidates()
    assert program.calls == ["triton_tem_fused_mm_0"] and program.descriptors >= 2
    assert "make_tensor_descriptor" in program.find_part("    a_desc =", "        # rematerialize")
    for shapes, flag in (((512, 511), True), ((512, 512), False)):
        options["triton__enable_persistent_tma_matmul"] = flag
        program = generated.generate(product, (512, 512), shapes, **options)
        assert "Triton, pointers" in program.describe_candidates()
        assert "TMA" not in program.describe_candidates()
    assert generated.generate(product, (64, 64), (64, 64)).describe_candidates() == "1 library (mm)"


@pytest.mark.compile
def test_a_function_that_cannot_be_traced_is_one_sentence():
    with pytest.raises(ValueError, match="Unsupported|no_such_method"):
        generated.generate(unknown, (8, 8))


def test_cases_are_distinct_and_mean_what_they_say():
    assert len({case.name for case in pointwise.CASES}) == 16
    assert sum(case.reduces for case in pointwise.CASES) == 8
    sizes = {case.name: case.nbytes for case in pointwise.CASES}
    assert sizes["silu(g)·u, large"] == 3 * 2 * 8192 * 14336
    assert sizes["halves, aligned"] == 3 * 2 * 8192 * 14336 and sizes["bf16 to fp32"] == 6 * 8192 * 8192
    assert sizes["sum of rows, small"] == 2 * (512 * 1024 + 512)


def test_tables_of_recorded_modes():
    cells, choices = experiments.read_cells(), experiments.read_choices()
    assert {"default", "max-autotune", "tma-only"} <= set(str(experiments.tabulate_products(cells)).split())
    assert "library (mm) 1.00" in experiments.describe_votes(choices)
    assert "×" in experiments.describe_limit(cells, exercises.roof())


@pytest.mark.compile
def test_calls_are_counted_as_the_lesson_says():
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(gated, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    numbers = [compiled(*pair) is not None and len(graphs) for pair in exercises.make_calls().values()]
    assert numbers == [1, 1, 2, 2, 2, 3, 4, 5, 6]


@pytest.mark.gpu
def test_a_small_case_is_measured():
    index = next(index for index, case in enumerate(pointwise.CASES) if case.name == "silu(g)·u, small")
    row = process.answer_with(pointwise._measure)({"index": index})
    assert row["status"] == "ok" and row["tma_loads"] == 2 and row["ratio"] > 0, row
