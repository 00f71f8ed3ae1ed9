"""Triton kernels launched without Triton's Python: their parameters, and what the driver is given."""

import json

import pretended
import pretended_gpu
import pytest

# In a process that compiles: the kernels of this one may be the interpreter's.
PROGRAM = """
import json, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor
import triton
from ch14.descriptors import kernels
from tilelab.runtime import triton_launch

x = torch.zeros(8, 512, dtype=torch.int16)
found = []
for kernel, given in ((kernels.tile_host_kernel, {"x": TensorDescriptor.from_tensor(x, [8, 64]), "y": None,
                       "out": TensorDescriptor.from_tensor(x, [8, 64]), "tiles": 4, "tiles_n": 1}),
                      (kernels.flat_device_kernel, {"x": x, "y": None, "out": x, "elements": 4096, "tiles": 4}),
                      (kernels.tile_pointers_kernel, {"x": x, "y": None, "out": x, "rows": 8, "vectors": 64,
                       "step_x": 64, "step_y": 0, "step_out": 64, "tiles": 4, "tiles_n": 1})):
    constants = {"BLOCK_M": 8, "BLOCK_N": 64, "TILES_PER_CTA": 1, "STAGES": 1, "VECTOR": 8, "y": None}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    kinds = {name: f"tensordesc<i16{given[name].block_shape}>" if isinstance(given[name], TensorDescriptor) else
             "*i16" if name in ("x", "out") else "i32" for name in given if name not in constants}
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    binary = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    maps = []
    values, follows = triton_launch.make_parameters(binary, {**given, **constants}, {"x": 0, "out": 1},
                                                    lambda *args, **rest: maps.append((args[1], rest)) or "map")
    found.append([[getattr(value, "value", str(type(value).__name__)) for value in values], maps, follows,
                  triton_launch.parameter_bytes(binary.asm["ptx"]), binary.metadata.global_scratch_size])
print(json.dumps(found))
"""


@pytest.mark.compile
def test_parameters_are_laid_out_as_triton_does():
    host, made, pointers = json.loads(pretended.run(PROGRAM))
    shape = [8, 512, 512, 1]
    assert host[0] == ["str", *shape, "str", *shape, 4, 1]
    assert host[1] == [[[8, 64], {"swizzle": "128B", "fill": "zero"}]] * 2
    assert host[2] == [0, *[None] * 4, 1, *[None] * 6]
    assert host[3] == [128, 4, 4, 8, 8, 128, 4, 4, 8, 8, 4, 4, 8, 8] and host[4] == 0
    assert made[0] == ["Tensor", "Tensor", 4096, 4] and made[4] == 256
    assert pointers[0] == ["Tensor", "Tensor", 8, 64, 64, 0, 64, 4, 1]
    assert pointers[3] == [8, 8, 4, 4, 4, 4, 4, 4, 4, 8, 8]


COMPARE = """
import torch
import pretended_gpu
from ch14 import attention, gemm
from tilelab.runtime import triton_launch

bind, seen = triton_launch.bind, []
make, workspaces = gemm._make_workspace, {}
gemm._make_workspace = lambda *given: workspaces.setdefault(str(given), make(*given))  # both ways get the same


def refuse(*_):
    raise triton_launch.UnknownParameters("so that Triton launches")


def compare(name, plan, calls):
    triton_launch.bind = lambda compiled, *rest: seen.append(compiled) or bind(compiled, *rest)
    ours = plan(*calls[0])
    triton_launch.bind = refuse
    tritons = plan(*calls[0])
    sizes, scratch = triton_launch.parameter_bytes(seen[-1].asm["ptx"]), seen[-1].metadata.global_scratch_size
    for tensors in calls * 2:  # the addresses move at each call
        found, wanted = (pretended_gpu.note_launch(sizes, launch, *tensors) for launch in (ours, tritons))
        assert len(found) == len(sizes) + 1, found
        differ = [line for line in range(len(found)) if found[line] != wanted[line]]
        assert not differ or scratch and differ == [len(sizes) - 1], (name, [(found[at], wanted[at]) for at in differ])
    print(name)


def matrices(m, n, k, dtype, layout="k"):
    one = None if dtype.itemsize > 1 else torch.ones(4)[:1]
    b = torch.randn(n, k).to(dtype).T if layout == "k" else torch.randn(k, n).to(dtype)
    out = torch.empty(m, n, dtype=dtype if one is None else torch.bfloat16)
    return torch.randn(m, k).to(dtype), b, one, one and torch.ones(1), out


torch.set_grad_enabled(False)
for config, *case in (("best", 300, 1000, 72, torch.float16, "n"), ("best", 300, 1024, 512, torch.float8_e4m3fn),
                      ("128×192×64 · 4 warps · 5 stages · persistent · C in 2 parts · early",
                       512, 768, 640, torch.bfloat16),
                      ("conservative", 300, 768, 640, torch.bfloat16), ("best", 1, 64, 4096, torch.bfloat16)):
    compare((config, *case), lambda *given: gemm._plan(*given, config).launch, [matrices(*case) for _ in range(2)])
for d, config, causal in ((64, "plain", True), (128, "persistent", True), (128, "overlap", False)):
    sizes = (4, 300), (2, 500), (2, 500), (4, 300)
    calls = [tuple(torch.randn(2, *size, d).bfloat16() for size in sizes) for _ in range(2)]
    compare((d, config), lambda *given: attention._plan(*given, causal, None, config).launch, calls)
"""


@pytest.mark.compile
@pytest.mark.skipif(not pretended_gpu.COMPILER, reason="needs a C compiler")
def test_the_driver_is_given_what_triton_gives_it():
    assert pretended_gpu.run(COMPARE).count("\n") == 8


FORMATS = """
import torch
import pretended_gpu
from ch14 import fp4_decode, mx_formats
from tilelab.runtime import triton_launch

torch.set_grad_enabled(False)
bind, seen = triton_launch.bind, []
triton_launch.bind = lambda compiled, *rest: seen.append(compiled) or bind(compiled, *rest)


def note(call, *tensors):
    return pretended_gpu.note_launch(triton_launch.parameter_bytes(seen[-1].asm["ptx"]), call, *tensors)


def compare(name, steps, tensors):  # a step is launched by Triton, and by what `bind` returns
    for number, step in enumerate(steps):
        positions = {tensor.data_ptr(): at for at, tensor in enumerate(tensors)}
        call = step.bind(positions)
        other = [tensor.clone() for tensor in tensors]
        assert note(call, *other) != note(call, *tensors) == note(step), (name, number)
        print(name, number)


for form, options in (("mxfp8_e4m3", {}), ("mxfp4", {"tiled": True}), ("nvfp4", {}), ("fp8_1x128", {})):
    x = torch.randn(130, 160 if form == "mxfp4" else 256).bfloat16()
    made = mx_formats.prepare_quantise(x, form, **options)
    out, steps = made.out, [step for step in made.steps if hasattr(step, "bind")]
    tensors = [x, *out.tensors().values()] + ([] if out.pair is None else [out.pair[1:], steps[0].args[2]])
    compare(form, steps, tensors)
    back = mx_formats.prepare_dequantise(out)
    compare(form, back.steps, [*out.tensors().values(), back.out])

weight = mx_formats.quantise(torch.randn(512, 1024).bfloat16(), "mxfp4")
x, out = torch.randn(5, 1024).bfloat16(), torch.empty(5, 512, dtype=torch.bfloat16)
for config in ("best", "64×1024 · 4 warps · 4 stages · registers"):
    def build(early):
        return fp4_decode._build(x, weight.values, weight.scales, out, config, early)

    call, chosen, parts, counters, _ = build(False)
    sizes = triton_launch.parameter_bytes(seen[-1].asm["ptx"])
    tensors = x, weight.values, weight.scales, out, *fp4_decode._make_workspace(parts, counters, x.device)
    moved = [tensor.clone() for tensor in tensors]
    late, early = note(call, *tensors), note(build(True)[0], *tensors)
    triton_launch.bind = lambda *_: (_ for _ in ()).throw(triton_launch.UnknownParameters())
    assert [pretended_gpu.note_launch(sizes, build(mode)[0], *tensors) for mode in (False, True)] == [late, early]
    triton_launch.bind = lambda compiled, *rest: seen.append(compiled) or bind(compiled, *rest)
    assert note(call, *moved)[1:5] != late[1:5] == early[1:5]
    assert ["attribute 6: 1" in found[0] for found in (late, early)] == [False, chosen.kernel == "registers"]
    print(config)
"""


@pytest.mark.compile
@pytest.mark.skipif(not pretended_gpu.COMPILER, reason="needs a C compiler")
def test_kernels_of_block_formats_get_what_triton_gives_them():
    # Two launches of a form, three of NVFP4, which first finds the tensor's scale; then two products.
    assert pretended_gpu.run(FORMATS).count("\n") == 2 + 2 + 3 + 2 + 2
