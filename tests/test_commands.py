"""What all topics' commands have in common: one engine reads their tables."""

import pathlib
import runpy
import signal
import sys

import commands
import pytest
from cases import cases

from ch14.moe.configs import SETS
from tilelab.records import results

ROOT = pathlib.Path(__file__).parents[1]
LONG = "9" * 4301
BAD = {  # {module: {arguments: what is said}}; the arguments are bad usage
    "ch07.bulk_copy": {
        "--bytes 6": "--bytes must be a positive multiple of 4, below 2^40; it is 6.",
        "--bytes many": "argument --bytes: invalid int value: 'many'",
        "--variant ring": "--variant must be one of loads, cp_async, bulk_single, bulk_batch, bulk_ring, best, all; ",
        "--target sm_90": "--target must name a target: sm_90 lacks the architecture-specific instructions: choose",
    },
    "ch07.resample": {
        "--kernel fast": "--kernel must be best, all or of search_a_thread, ",
        "--kernel bulk_rows --shape 1,2,3,5": "bulk_rows needs rows of a multiple of 16 bytes; here a row takes 10.",
        "--shape 1,2,3": "--shape must be B,S,T,D, each from 1 to 2,147,483,647; it is 1,2,3.",
        "--target sm_90a --mode ncu": "--target only compiles; leave out --mode ncu.",
        "--iterations 1": "--iterations must be a whole number from 2 to 10,000; it is 1.",
        "--report kept": "--report keeps the profiler's report; add --mode ncu.",
        "--mode ncu --report /dev/null/kept": "--report takes a file; /dev/null is no folder.",
    },
    "ch10.tile_pipeline": {
        "--shape 6": "--shape must be R,C, each from 1 to 2,147,450,880; it is 6.",
        "--shape=-4,4": "it is -4,4.",
        "--op accumulate --shape 4,4": "--shape must be B,R,C, each from ",
        "--variant ringlet": "--variant must be one of single, ",
        f"--shape {LONG},4": f"it is {'9' * 60}.",
        "--load shape=100x64": "--load goes with --report.",
        "--report /dev/null/x.md": "--report takes a file; /dev/null is no folder.",
        "--report r.md --op transpose": "--report goes with --load and --target only; --op was given too.",
        "--report r.md --target sm_80": "--target must have TMA, sm_90a or newer; it is sm_80.",
        "--report r.md --load nix=1": "each part is FIELD=VALUE with one of dtype, shape, ",
    },
    "ch10.wgmma_gemm": {
        "--mnk 1,2": "--mnk must be M,N,K, each from 1 to 2,147,482,624; it is 1,2.",
        "--mnk 8,8,9": "--mnk must be M,N,K with N and K multiples of 8; it is 8,8,9.",
        "--step nix": "--step must be one of best, tile, ring, ",
        "--tune nix.txt --compile": "--tune stands alone; --compile was given too.",
    },
    "ch14.attention": {
        "--shape 1,3,2,64,64": "--shape must be B,H,HK,S,D with H a multiple of HK, S up to 65,536, D 64 or 128, and",
        "--step fast": "--step must be one of plain, roles, ",
    },
    "ch14.blockscaled": {"--mnkl 1,2,3": "--mnkl must be M,N,K,L, each from 1 to 131,072; it is 1,2,3."},
    "ch14.bug_hunt": {
        "--target sm_90": "--target must be some of sm_90a, ",
        "--triton 3.5": "a Triton version must be three numbers such as 3.5.1; it is '3.5'",
        "--start TILE=3": "--start takes LOOP=..., LOADS=..., ",
        "--start num_warps=3": "--start takes num_warps=2|4|8|16; it is 'num_warps=3'.",
        "--reach -1": "--reach must be 0 or more; it is -1.",
        "--matrix --triton 3.4.0": "--triton must be one of 3.5.0, ",
    },
    "ch14.compiled": {
        "--shape 1,2": "a shape of matmul is M,N,K, each from 1 to 2^20; it is 1,2",
        "--shape a,b,c": "--shape takes sizes such as 4096,4096,4096; it is 'a,b,c'.",
        "--mode fast": "choose eager, default, max-autotune",
        "--workload mlp --mode flash": "unknown mode 'flash' of mlp",
    },
    "ch14.descriptors": {
        "--shape 4096": "--shape must be R,C, each from ",
        "--shape 64,12": "--shape must be R,C with columns in multiples of 8, which are 16 bytes of bf16, and "
        "up to 2^33",
        "--variant rows_host": "--variant must be one of tile_host, ",
    },
    "ch14.fp4_decode": {
        "--mnk 65,8,32": "--mnk must be M,N,K with M at most 64 and K a multiple of 32; it is 65,8,32.",
        "--config fast": "--config must be one of ",
    },
    "ch14.fp8_gemm": {
        "--mnk 8,9,128": "--mnk must be M,N,K with N a multiple of 8 and K of 128; it is 8,9,128.",
        "--mode profile --compile": "--mode stands alone; --compile was given too.",
        "--tune x --mode profile": "--tune stands alone; --mode was given too.",
    },
    "ch14.gemm": {
        "--mnk 4096,4096": "--mnk must be M,N,K, each from 1 to 2,147,483,647; it is 4096,4096.",
        "--target sm_90a --config fast": "unknown configuration 'fast'; choose best",
        "--target sm_90a --config 96,96,64,4,3": "block_m must be one of 16, 32",
        "--claim --sweep": "--claim goes with --json only; --sweep was given too.",
        "--tune x --json -": "--tune stands alone; --json was given too.",
        "--sweep --config proposed": "--sweep brings its own configurations: leave out --config.",
        "--dtype fp8 --layout n": "float8 needs B with K contiguous",
        "--sweep --target sm_90a --journal .": "--journal takes a file; . is a folder.",
        "--sweep --target sm_90a --journal /dev/zero": "/dev/zero is neither",
        f"--sweep --target sm_90a --journal {'x' * 300}": "(File name too long)",
    },
    "ch14.moe": {
        "--tokens 0": "--tokens must be a whole number from 1 to 65,536; it is 0.",
        "--config fast": "--config must be one of ",
        "--config best --tokens 1": "--config goes with --target and --dtype and --json only; --tokens was given too.",
        "--model gpt-oss": "argument --model: invalid choice: 'gpt-oss'",
        "--model 'gpt-oss 20B' --dtype fp8": "fp8 needs K a multiple of 128",
    },
    "ch14.mx_formats": {
        "--shape 3": "--shape must be R,C, each from 1 to 1,048,576; it is 3.",
        "--variant cvt --format mxfp4": "--variant must be one of group_a_lane, ",
        "--format fp8_1x128 --tiled": "scales of one byte",
        "--format nvfp4 --rule ceil": "the scales of nvfp4 are e4m3",
    },
}
NEEDS = {  # what a machine without a GPU is told, for some arguments
    "ch07.resample": {"--mode performance --dtype float32": "ch07_resample_ladder holds no such row"}
}


SHOWS = {  # what it shows instead, of its record or of what it compiles
    "ch07.resample": {
        "": "ch07_resample_check: recorded on NVIDIA H200",
        "--mode performance --kernel all": "search_a_thread 1024 x 1024 x 2048 x 128",
        "--mode ncu --kernel lane0_search": "dram_percent",
    },
    "ch14.compiled": {
        "": "ch14_compiled_cells: recorded on NVIDIA H200",
        "--workload attention --mode flash --json -": '"name": "flash"',
    },
    "ch14.gemm": {"--copy": "ch14_gemm_copy: recorded on NVIDIA H200"},
}


def flatten(table: dict[str, dict[str, str]]) -> list[tuple[str, str, str]]:
    return [(module, arguments, said) for module, each in table.items() for arguments, said in each.items()]


def assert_refused(capsys, module: str, arguments: str, said: str) -> None:
    status, out, err = commands.run(capsys, module, arguments)
    assert status == 2 and not out and err.startswith(f"python -m {module}: ")
    assert said in err and err.count("\n") == 1 and len(err) < 600


def test_every_command_is_listed_here():
    assert list(BAD) == [".".join(path.parts[-3:-1]) for path in sorted(ROOT.glob("ch*/*/__main__.py"))]


@pytest.mark.parametrize("module, arguments, said", flatten(BAD))
def test_bad_usage_is_one_line_and_two(capsys, monkeypatch, tmp_path, module, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert_refused(capsys, module, arguments, said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module, arguments, said", flatten(NEEDS))
def test_without_a_gpu_it_is_one_line_and_two(capsys, no_gpu, module, arguments, said):
    assert_refused(capsys, module, arguments, said)


@pytest.mark.parametrize("module, arguments, said", flatten(SHOWS))
def test_without_a_gpu_it_shows_its_record(capsys, no_gpu, module, arguments, said):
    status, out, err = commands.run(capsys, module, arguments)
    assert status == 0 and not err and said in out
    assert module == "ch14.gemm" or "--json -" in arguments or "Nothing is measured here (no GPU" in out


@pytest.mark.compile
@pytest.mark.parametrize(
    "module, arguments, said",
    [
        ("ch07.resample", "--mode single_run", "compiled for sm_90a"),
        ("ch14.gemm", "--copy --target sm_100a", "256×256 · 16 warps · 5 stages"),
        (
            "ch14.gemm",
            "--config 64,64,32,4,1",
            "It is compiled for sm_90a.\n64×64×32 · 4 warps · 1 stage · plain",
        ),
        (
            "ch14.blockscaled",
            "--mma_tiler_mn 256,128 --cluster_shape_mn 2,1 --benchmark_mode",
            "compiled for sm_100a",
        ),
    ],
)
def test_without_a_gpu_it_compiles(capsys, no_gpu, module, arguments, said):
    status, out, err = commands.run(capsys, module, arguments)
    assert status == 0 and not err and said in out


def test_the_command_line_of_the_gemm_obeys_the_variable(monkeypatch):
    parse = commands.find("ch14.gemm").parse
    monkeypatch.setenv("TILES_GEMM_CONFIG", "conservative")
    assert parse([]).config == "conservative" and parse(["--config", "proposed"]).config == "proposed"
    assert parse(["--sweep"]).config == "best"
    monkeypatch.setenv("TILES_TMA", "no")
    with pytest.raises(SystemExit):
        parse([])


@pytest.mark.parametrize("module", BAD)
def test_options_that_all_commands_have(capsys, module):
    status, out, _ = commands.run(capsys, module, "--help")
    options = [f"--{name}" for name in (*commands.find(module).options, "json")]
    assert status == 0 and all(option in out for option in options)


def test_a_doorway_runs_the_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bulk_copy", "--bytes", "6"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the end of a command replaces what Ctrl-C does
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("ch07.bulk_copy", run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("python -m ch07.bulk_copy: --bytes must be ")


@pytest.mark.compile
@cases(
    "module, arguments, names",
    (
        "ch07.bulk_copy",
        "--op axpy --target sm_90a",
        ["bulk_batch", "loads", "cp_async", "bulk_single", "bulk_ring"],
    ),
    ("ch10.tile_pipeline", "--op add_shared --target sm_100a", ["alone", "two", "four"]),
    ("ch10.wgmma_gemm", "--compile --step ring", ["ring"]),
    ("ch14.attention", "--target sm_100a", ["best"]),
    ("ch14.descriptors", "--op add --shape 4096,4096 --variant tile_host --target sm_100a", ["tile_host"]),
    ("ch14.moe", "--config best --dtype fp8 --target sm_100a", [SETS["fp8", False][1].name]),
    ("ch14.mx_formats", "--format mxfp4 --shape 64,64 --target sm_100a", ["mxfp4"]),
)
def test_it_compiles_for_a_target_without_a_gpu(capsys, tmp_path, module, arguments, names):
    path = tmp_path / "new" / "rows.json"
    status, out, err = commands.run(capsys, module, f"{arguments} --json {path}")
    record = results.read(path)
    assert status == 0 and not err and out.startswith(f"{module.replace('.', '_')}: compiled for sm_")
    assert record["source"] == commands.find(module).source() and record["versions"]
    assert [row["name"] for row in record["rows"]] == names
    for row in record["rows"]:
        assert row["status"] == "ok" and not row["spills"] and row["registers"] and row["config"]
        assert row["target"]
        assert str(row["registers"]) in out


@pytest.mark.compile
@pytest.mark.parametrize("module", ["ch07.bulk_copy", "ch07.resample", "ch10.tile_pipeline"])
def test_no_kernel_for_ampere_is_two(capsys, module):
    best = "" if module == "ch07.resample" else "--variant best"
    status, record = commands.run_json(capsys, module, f"{best} --target sm_80")
    (row,) = record["rows"]
    assert status == 2 and row["status"] == "failed"
    assert ".cu does not compile for sm_80: ptxas: " in row["reason"]
