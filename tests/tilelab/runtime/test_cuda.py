"""CUDA C++: compiling with NVRTC, the cache of cubins, and, on a GPU, launches."""

import ctypes
import os
import pathlib
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import cases

from tilelab.runtime import cuda, device

FILL = 'extern "C" __global__ void fill(int* out, int n) { if (threadIdx.x < n) out[threadIdx.x] = VALUE; }'
# Writes and reads the last word of its dynamic shared memory, so too small a launch faults or gives wrong values.
LAST_WORD = """
extern "C" __global__ void last_word(const float* in, float* out, float scale, unsigned words) {
    extern __shared__ float tile[];
    tile[words - 1 - threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = scale * tile[words - 1 - threadIdx.x];
}
"""
# The copy of chapter 7 as CCCL spells it.
BARRIER = """
#include <cuda/barrier>
extern "C" __global__ void copy(const float4* in, float4* out) {
    __shared__ alignas(128) float4 tile[256];
    __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
    if (threadIdx.x == 0) init(&barrier, blockDim.x);
    __syncthreads();
    cuda::memcpy_async(tile + threadIdx.x, in + threadIdx.x, cuda::aligned_size_t<16>(16), barrier);
    barrier.arrive_and_wait();
    out[threadIdx.x] = tile[255 - threadIdx.x];
}
"""


@pytest.fixture(autouse=True)
def cubins(tmp_path, monkeypatch):
    """The folder of this test's cubins, still to be made."""
    monkeypatch.setenv("TILES_CUBINS", str(tmp_path / "cubins"))
    return tmp_path / "cubins"


@pytest.fixture
def compiled(monkeypatch):
    """What NVRTC really compiles from here on: one entry per program."""
    from cuda.bindings import nvrtc

    programs, run = [], nvrtc.nvrtcCompileProgram
    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", lambda *args: programs.append(args) or run(*args))
    return programs


def write(folder, **texts):
    """Write texts to name.cu, or name.cuh for all but the first; return the first's path."""
    paths = [folder / f"{name}.{'cuh' if index else 'cu'}" for index, name in enumerate(texts)]
    for path, text in zip(paths, texts.values()):
        path.write_text(text)
    return paths[0]


def test_compile_cubin():
    for target in device.TARGETS:
        cubin = cuda.compile_cubin(FILL, target, options=["-DVALUE=7"])
        assert cubin[:4] == b"\x7fELF" and b"fill" in cubin
        assert target.encode() in cubin  # the architecture is named in the cubin


def test_compile_options_reach_the_compiler(tmp_path):
    plain = cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"])
    assert plain == cuda.compile_cubin(FILL, "sm_90a", options=("-DVALUE=7",))
    assert plain != cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=8"])
    (tmp_path / "value.h").write_text("#define VALUE 7\n")
    cuda.compile_cubin('#include "value.h"\n' + FILL, "sm_90a", options=[f"-I{tmp_path}"])


def test_unknown_option():
    for option in ("--lineinfo", "-O9", "VALUE=7"):
        with pytest.raises(ValueError, match="unknown compiler option"):
            cuda.compile_cubin(FILL, "sm_90a", options=[option])


def test_compile_error_shows_the_log_and_the_line():
    with pytest.raises(cuda.CompileError) as error:
        cuda.compile_cubin("\n" + FILL, "sm_90a", name="fill.cu")
    message = str(error.value)
    assert message.startswith("fill.cu does not compile for sm_90a:\nfill.cu(2): error: ")
    assert 'fill.cu(2): error: identifier "VALUE" is undefined' in message and "\0" not in message
    assert "out[threadIdx.x] = VALUE; }" in message  # the offending line itself


def test_compile_error_in_a_file_and_in_its_header(tmp_path):
    path = write(tmp_path, kernel='#include "inner.cuh"\n\nint x = nowhere;\n', inner="\nint y = lost;\n")
    with pytest.raises(cuda.CompileError) as error:
        cuda.compile_file(path, "sm_90a")
    message = str(error.value)
    assert message.startswith("kernel.cu does not compile for sm_90a:\n") and str(tmp_path) not in message
    assert 'kernel.cu(3): error: identifier "nowhere" is undefined\n  int x = nowhere;\n' in message
    assert 'inner.cuh(2): error: identifier "lost" is undefined\n  int y = lost;\n' in message


def test_unknown_architecture_is_a_compile_error():
    with pytest.raises(cuda.CompileError, match="gpu-architecture"):
        cuda.compile_cubin(FILL, "sm_42", options=["-DVALUE=7"])


def test_file_finds_its_own_headers_and_the_bench_s(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "inner.cuh").write_text("#error the current folder is nobody's")
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = write(
        tmp_path, kernel='#include "ptx.cuh"\n#include "inner.cuh"\n' + FILL, inner="const u32 VALUE = 7;"
    )
    assert b"fill" in cuda.compile_file(path, "sm_90a")
    assert b"fill" in cuda.compile_file(os.path.relpath(path), "sm_90a")
    with pytest.raises(FileNotFoundError):
        cuda.compile_file(tmp_path / "none.cu", "sm_90a")


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])  # the second has the copy engine
def test_headers_of_cccl_are_found(target):
    assert b"copy" in cuda.compile_cubin(BARRIER, target)


def test_headers_that_are_not_installed(tmp_path, monkeypatch):
    from cuda import pathfinder

    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    path = write(tmp_path, kernel='#include "inner.cuh"\n', inner=BARRIER)
    with pytest.raises(cuda.CompileError) as error:
        cuda.compile_file(path, "sm_90a")
    assert str(error.value) == (
        "kernel.cu includes <cuda/barrier>, and the cccl headers are not installed: "
        "run pip install -r requirements.txt."
    )
    cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"])  # which needs none of them


def test_a_cubin_is_compiled_once(cubins, compiled):
    first = cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"])
    assert cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"]) == first and len(compiled) == 1
    assert cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"], cache=False) == first
    assert len(compiled) == 2
    assert len(list(cubins.iterdir())) == 1


def test_what_goes_into_a_cubin_tells_it_apart(compiled):
    given = {"source": FILL, "target": "sm_90a", "options": ["-DVALUE=7"]}
    first = cuda.compile_cubin(**given)
    changes = ({"source": FILL + " "}, {"target": "sm_100a"}, {"options": ["-DVALUE=8"]})
    changes += ({"name": "other.cu"}, {"options": ["-DVALUE=7", "-DOTHER"]})
    for number, changed in enumerate(changes, 2):
        cuda.compile_cubin(**{**given, **changed})
        assert len(compiled) == number, changed
    assert cuda.compile_cubin(**given) == first and len(compiled) == number


def test_a_new_compiler_compiles_anew(compiled, monkeypatch):
    cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"])
    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", lambda *args: (0, 99, 0))
    cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"])
    assert len(compiled) == 2


@pytest.mark.parametrize("bracket", ['"inner.cuh"', "<inner.cuh>"])
def test_an_edited_header_compiles_anew(tmp_path, compiled, bracket):
    (tmp_path / "deep").mkdir()
    path = write(tmp_path, kernel='#include "outer.cuh"\n' + FILL, outer=f"  #  include {bracket} // VALUE\n")
    inner, options = tmp_path / "deep" / "inner.cuh", [f"-I{tmp_path / 'deep'}"]
    inner.write_text("#define VALUE 7\n")
    first = cuda.compile_file(path, "sm_90a", options)
    inner.write_text("#define VALUE 8\n")
    assert cuda.compile_file(path, "sm_90a", options) != first and len(compiled) == 2
    inner.write_text("#define VALUE 7\n")
    assert cuda.compile_file(path, "sm_90a", options) == first and len(compiled) == 2


def test_headers_that_include_each_other(tmp_path):
    path = write(
        tmp_path,
        kernel='#include "a.cuh"\n' + FILL,
        a='#pragma once\n#include "b.cuh"\n',
        b='#pragma once\n#include "a.cuh"\n#define VALUE 7\n',
    )
    assert b"fill" in cuda.compile_file(path, "sm_90a")


def test_a_damaged_cubin_is_compiled_anew(cubins, compiled):
    first = cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"])
    (kept,) = cubins.iterdir()
    whole = kept.read_bytes()
    for number, damaged in enumerate(
        (b"", whole[:20], whole[:-100], whole[:-1] + b"?", bytes(len(whole))), 2
    ):
        kept.write_bytes(damaged)
        assert cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"]) == first and len(compiled) == number
        assert kept.read_bytes() == whole


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_folder_that_cannot_be_written_is_replaced(tmp_path, monkeypatch, compiled, below):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TILES_CUBINS", str(tmp_path / "file" / below))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(
        UserWarning, match="cannot be written .Not a directory.: compiled kernels are kept in "
    ):
        for _ in range(2):
            assert b"fill" in cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"])
    assert len(compiled) == 1 and (tmp_path / "file").read_text() == "in the way"


def test_a_full_disk_leaves_nothing_behind(cubins, monkeypatch):
    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert b"fill" in cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"])
    assert list(cubins.iterdir()) == []


def test_compiling_at_once(cubins):
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda i: cuda.compile_cubin(FILL, "sm_90a", options=[f"-DVALUE={i % 2}"]), range(16))
        )
    assert len(set(found)) == 2 and len(list(cubins.iterdir())) == 2


def test_where_cubins_are_kept(monkeypatch):
    monkeypatch.delenv("TILES_CUBINS")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cuda.named_cubin_folder() == pathlib.Path("/caches/tiles-in-flight/cubins")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cuda.named_cubin_folder() == pathlib.Path.home() / ".cache/tiles-in-flight/cubins"


@pytest.fixture
def loaded(monkeypatch):
    """A pretended H200 on which loading gives the names of the kernels."""
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a"))
    monkeypatch.setattr(cuda, "current_device", lambda: types.SimpleNamespace(device_id=0))
    monkeypatch.setattr(cuda, "_kernels", {})
    names = []
    monkeypatch.setattr(cuda, "load_cubin", lambda cubin, name: names.append(name) or object())
    return names


def test_kernel_is_loaded_once_until_edited(tmp_path, loaded, monkeypatch):
    path = write(tmp_path, kernel='#include "inner.cuh"\n' + FILL, inner="#define VALUE 7\n")
    first = cuda.load_kernel(path, "fill")
    assert cuda.load_kernel(str(path), "fill") is first
    monkeypatch.chdir(tmp_path)
    assert cuda.load_kernel("kernel.cu", "fill") is first and len(loaded) == 1
    assert cuda.load_kernel(path, "fill", ["-DOTHER=1"]) is not first
    assert cuda.load_kernel(path, "fill") is first
    for edited in (path, tmp_path / "inner.cuh"):
        edited.write_text(edited.read_text() + "\n")
        second = cuda.load_kernel(path, "fill")
        assert second is not first and cuda.load_kernel(path, "fill") is second
        first = second
    path.unlink()
    with pytest.raises(FileNotFoundError):
        cuda.load_kernel(path, "fill")


def test_without_a_gpu_is_unsupported(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))
    with pytest.raises(device.Unsupported, match=r"here is no GPU \(torch is a CPU build\)"):
        cuda.load_cubin(b"", "fill")
    with pytest.raises(device.Unsupported):
        cuda.launch(None, 1, 32, [])
    with pytest.raises(device.Unsupported):
        cuda.prepare_launch(None, 1, 32, [])
    with pytest.raises(device.Unsupported):
        cuda.load_kernel(tmp_path / "none.cu", "fill")


def test_too_much_shared_memory_is_unsupported(monkeypatch):
    here = device.Device("NVIDIA GB10", (12, 1), "sm_121a", smem_per_block=101376)
    monkeypatch.setattr(device, "current", lambda: here)
    monkeypatch.setattr(cuda, "current_device", lambda: None)
    with pytest.raises(device.Unsupported, match="needs 131,072 B .* NVIDIA GB10 has 101,376 B"):
        cuda.launch(None, 1, 32, [], smem_bytes=131072)


def test_plain_numbers_and_cpu_tensors_are_refused():
    for value in (3, 1.5, True):
        with pytest.raises(TypeError, match="no C width"):
            cuda.as_parameter(value)
    with pytest.raises(ValueError, match="CPU tensor"):
        cuda.as_parameter(torch.zeros(1))


@pytest.mark.gpu
def test_launch_with_much_shared_memory_on_a_side_stream():
    here = device.current()
    kernel = cuda.load_cubin(cuda.compile_cubin(LAST_WORD, here.target), "last_word")
    source = torch.randn(3, 128, device="cuda")
    late, out = torch.full_like(source, float("nan")), torch.full_like(source, float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on any other stream would read `late` before it is filled
        late.copy_(source)
        args = [late, out, ctypes.c_float(1.5), ctypes.c_uint32(here.smem_per_block // 4)]
        cuda.launch(kernel, (3, 1, 1), 128, args, smem_bytes=here.smem_per_block)
    stream.synchronize()
    torch.testing.assert_close(out, 1.5 * source, rtol=0, atol=0)


@pytest.mark.gpu
def test_launch_on_the_default_stream():
    kernel = cuda.load_cubin(cuda.compile_cubin(FILL, device.current().target, options=["-DVALUE=7"]), "fill")
    out = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    cuda.launch(kernel, 1, 32, [out, ctypes.c_int(20)])
    assert out.tolist() == [7] * 20 + [-1] * 12


@pytest.mark.gpu
def test_prepared_launch_follows_the_stream_and_keeps_its_tensors(tmp_path):
    here = device.current()
    kernel = cuda.load_kernel(write(tmp_path, kernel=LAST_WORD), "last_word")
    source, out = torch.randn(3, 128, device="cuda"), torch.zeros(3, 128, device="cuda")
    expected = 1.5 * source
    words = ctypes.c_uint32(here.smem_per_block // 4)
    launched = cuda.prepare_launch(
        kernel, 3, 128, [source, out, ctypes.c_float(1.5), words], here.smem_per_block
    )
    torch.cuda.synchronize()
    del source
    torch.randn(3, 128, device="cuda")  # would lie where `source` did
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launched()
    torch.cuda.synchronize()
    assert not out.any()  # captured, not run
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.zero_()
    with ThreadPoolExecutor(1) as pool:  # a thread that has no context yet
        pool.submit(launched).result()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_kernel_with_cccl_runs(tmp_path):
    kernel = cuda.load_kernel(write(tmp_path, kernel=BARRIER), "copy")
    source, out = torch.randn(256, 4, device="cuda"), torch.zeros(256, 4, device="cuda")
    cuda.launch(kernel, 1, 256, [source, out])
    torch.testing.assert_close(out, source.flip(0), rtol=0, atol=0)


@pytest.mark.gpu
@cases("static, dynamic", (40, 4), (40, 20), (60, 1), (2, 100))  # KiB; 48 together need an opt-in
def test_static_and_dynamic_shared_memory_together(static, dynamic):
    source = f"""
    extern "C" __global__ void sum(int* out) {{
        __shared__ int tile[{static} * 256];
        extern __shared__ int more[];
        tile[{static} * 256 - 1 - threadIdx.x] = threadIdx.x;
        more[{dynamic} * 256 - 1 - threadIdx.x] = 100;
        __syncthreads();
        out[threadIdx.x] = tile[{static} * 256 - 32 + threadIdx.x] + more[{dynamic} * 256 - 32 + threadIdx.x];
    }}"""
    kernel = cuda.load_cubin(cuda.compile_cubin(source, device.current().target), "sum")
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    for size in (0, 512, 0):  # a smaller launch in between takes nothing back
        cuda.launch(kernel, 1, 32, [out], dynamic * 1024 + size)
    assert out.tolist() == list(range(131, 99, -1))
