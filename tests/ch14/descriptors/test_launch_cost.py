import json
import os
import subprocess
import sys

import pytest
import torch

from ch14 import descriptors
from ch14.descriptors import experiments, launch_cost
from ch14.descriptors.configs import TileConfig
from tilelab import worker_pool

# In a process that compiles: the kernels of this one may be the interpreter's.
PROGRAM = """
import json, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor
import triton
from ch14.descriptors import kernels, launch_cost

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
    values = launch_cost.make_parameters(binary, {**given, **constants},
                                         lambda *args, **rest: maps.append((args[1], rest)) or "map")
    found.append([[getattr(value, "value", str(type(value).__name__)) for value in values], maps,
                  launch_cost.parameter_bytes(binary.asm["ptx"]), binary.metadata.global_scratch_size])
print(json.dumps(found))
"""


@pytest.mark.compile
def test_parameters_are_laid_out_as_triton_does():
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(worker_pool.ROOT), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env,
                          cwd=worker_pool.ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    host, made, pointers = json.loads(done.stdout)
    shape = [8, 512, 512, 1]
    assert host[0] == ["str", *shape, "str", *shape, 4, 1]
    assert host[1] == [[[8, 64], {"swizzle": "128B", "fill": "zero"}]] * 2
    assert host[2] == [128, 4, 4, 8, 8, 128, 4, 4, 8, 8, 4, 4, 8, 8] and host[3] == 0
    assert made[0] == ["Tensor", "Tensor", 4096, 4] and made[3] == 256
    assert pointers[0] == ["Tensor", "Tensor", 8, 64, 64, 0, 64, 4, 1]
    assert pointers[2] == [8, 8, 4, 4, 4, 4, 4, 4, 4, 8, 8]


@pytest.mark.gpu
def test_every_way_to_launch_copies():
    rows = launch_cost.measure_cost()
    assert len(rows) == 9 and {row["status"] for row in rows} == {"ok"}
    assert all(row["us"] > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("op, way, block", [
    ("copy", "host", (64, 64)), ("add", "host", (0, 1024)), ("add", "device", (8, 64)), ("add", "pointers", (4, 256)),
    ("gather", "host", (1, 256)), ("gather", "device", (1, 1024))])
def test_a_bound_launch_computes_the_same(op, way, block):
    given = experiments.make_inputs(op, 333, 1032, torch.float32)
    inputs = {name: tensor for name, tensor in given.items() if name != "out"}
    launch = descriptors.prepare(op, config=TileConfig(way, *block, 1), **given)
    call = launch_cost.bind(launch)
    for _ in range(2):
        given["x"].normal_()
        given["out"].fill_(float("nan"))
        call()
        assert torch.equal(given["out"], descriptors.spec(op, **inputs).float())  # the exact sum, rounded once
