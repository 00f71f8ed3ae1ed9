import ctypes

import pytest
import torch

from tilelab import cuda, device

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


@pytest.mark.parametrize("target", device.TARGETS)
def test_compile_cubin(target):
    cubin = cuda.compile_cubin(FILL, target, options=["-DVALUE=7"])
    assert cubin[:4] == b"\x7fELF" and b"fill" in cubin
    assert target.encode() in cubin  # the architecture is named in the cubin


def test_compile_options_reach_the_compiler(tmp_path):
    plain = cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7"])
    assert plain == cuda.compile_cubin(FILL, "sm_90a", options=("-DVALUE=7",))
    assert plain != cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=8"])
    assert b".debug_line" in cuda.compile_cubin(FILL, "sm_90a", options=["-DVALUE=7", "--lineinfo"])
    (tmp_path / "value.h").write_text("#define VALUE 7\n")
    cuda.compile_cubin('#include "value.h"\n' + FILL, "sm_90a", options=[f"-I{tmp_path}"])


@pytest.mark.parametrize("option", ["--no-such-field", "-O9", "VALUE=7", "--arch=sm_80"])
def test_unknown_option(option):
    with pytest.raises(ValueError, match="unknown compiler option"):
        cuda.compile_cubin(FILL, "sm_90a", options=[option])


def test_compile_error_shows_the_log():
    with pytest.raises(cuda.CompileError) as error:
        cuda.compile_cubin(FILL, "sm_90a", name="fill.cu")
    message = str(error.value)
    assert message.startswith("fill.cu does not compile for sm_90a:\n")
    assert 'fill.cu(1): error: identifier "VALUE" is undefined' in message and "\0" not in message


def test_unknown_architecture_is_a_compile_error():
    with pytest.raises(cuda.CompileError, match="gpu-architecture"):
        cuda.compile_cubin(FILL, "sm_42", options=["-DVALUE=7"])


def test_without_a_gpu_is_unsupported(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))
    with pytest.raises(device.Unsupported, match=r"here is no GPU \(torch is a CPU build\)"):
        cuda.load(b"", "fill")
    with pytest.raises(device.Unsupported):
        cuda.launch(None, 1, 32, [])


def test_too_much_shared_memory_is_unsupported(monkeypatch):
    here = device.Device("NVIDIA GB10", (12, 1), "sm_121a", smem_per_block=101376)
    monkeypatch.setattr(device, "current", lambda: here)
    monkeypatch.setattr(cuda, "_current_device", lambda: None)
    with pytest.raises(device.Unsupported, match="needs 131,072 B .* NVIDIA GB10 has 101,376 B"):
        cuda.launch(None, 1, 32, [], smem_bytes=131072)


@pytest.mark.parametrize("value", [3, 1.5, True])
def test_plain_number_has_no_width(value):
    with pytest.raises(TypeError, match="no C width"):
        cuda._argument(value)


def test_cpu_tensor_is_refused():
    with pytest.raises(ValueError, match="CPU tensor"):
        cuda._argument(torch.zeros(1))


@pytest.mark.gpu
@pytest.mark.gpu
def test_launch_with_much_shared_memory_on_a_side_stream():
    here = device.current()
    kernel = cuda.load(cuda.compile_cubin(LAST_WORD, here.target), "last_word")
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
@pytest.mark.gpu
def test_launch_on_the_default_stream():
    kernel = cuda.load(cuda.compile_cubin(FILL, device.current().target, options=["-DVALUE=7"]), "fill")
    out = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    cuda.launch(kernel, 1, 32, [out, ctypes.c_int(20)])
    assert out.tolist() == [7] * 20 + [-1] * 12
