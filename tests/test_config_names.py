"""Every operator's `config` takes a configuration's spoken name."""

import types

import pytest
import torch

from ch07 import bulk_copy, resample
from ch10 import tile_pipeline, wgmma_gemm
from ch14 import attention, fp4_decode, fp8_gemm, gemm, mx_formats
from ch14.blockscaled import emulated, native
from ch14.fp8_gemm.lesson.verification import fp8_operands
from tilelab.runtime import operands


def multiply_by_codes(config):
    a = mx_formats.Packed("mxfp4", (32, 64), torch.zeros(32, 32).byte(), torch.zeros(32, 2).byte())
    return native.prepare(a, a.T, config=config)


def multiply_decoded(config):
    return emulated._prepare_multiply(*torch.ones(3, 32, 32).bfloat16(), None, None, config)


def multiply_fp4(config):
    x, weight = torch.ones(5, 64).bfloat16(), torch.ones(64, 32).byte()
    return fp4_decode._build(x, weight, weight[:, :2].clone(), None, config, False)


def multiply_fp8(config):
    return fp8_gemm._plan(*fp8_operands(8, 128, 128, where="cpu")[:4], *[None] * 4, config, None)


def multiply(config):
    return gemm._plan(*torch.ones(2, 32, 32).bfloat16(), None, None, None, config)


OPERATORS = {  # what chooses a configuration, and the configuration
    "bulk_copy": (lambda config: bulk_copy.job(config, "sm_90a"), bulk_copy.configs("copy")["bulk_ring"]),
    "resample": (lambda config: resample.job(config, "sm_90a"), resample.configs()["lane0_search"]),
    "tile_pipeline": (
        lambda config: tile_pipeline.choose_config("transpose", config, (64, 64)),
        tile_pipeline.configs("transpose")["down"],
    ),
    "wgmma_gemm": (
        lambda config: wgmma_gemm.resolve_config(config, 512, 512, 512),
        wgmma_gemm.configs()["raster"],
    ),
    "gemm": (
        multiply,
        gemm.GemmConfig(128, 128, 64, 4, 6, kernel="persistent", epilogue_subtile=2, pdl=True),
    ),
    "attention": (
        lambda config: attention._plan(*torch.ones(3, 1, 1, 8, 128).bfloat16(), None, False, None, config),
        attention.configs(128)["persistent"],
    ),
    "mx_formats": (
        lambda config: mx_formats.prepare_quantise(
            torch.ones(32, 64).bfloat16(), "mxfp8_e4m3", config=config
        ),
        mx_formats.MxConfig(4096, convert=False),
    ),
    "fp8_gemm": (multiply_fp8, fp8_gemm.configs()["tall"]),
    "fp4_decode": (multiply_fp4, fp4_decode.DecodeConfig("plain", 64, 1024, 4, 4)),
    "native": (multiply_by_codes, native.NativeConfig(128, 128, 128, 8, 3, "naive")),
    "emulated": (
        multiply_decoded,
        gemm.GemmConfig(128, 256, 64, 8, 4, kernel="persistent", epilogue_subtile=2),
    ),
}


class Chosen(Exception):
    """An operator has chosen its configuration, the first argument."""


@pytest.mark.parametrize("name", OPERATORS)
def test_a_configuration_is_found_by_its_name(name, monkeypatch):
    call, wanted = OPERATORS[name]
    choose, require = operands.choose_config, operands.require_gpu

    def stop(*args):
        raise Chosen(choose(*args))

    for module in (operands, *(each for each in globals().values() if isinstance(each, types.ModuleType))):
        if getattr(module, "choose_config", None) is choose:
            monkeypatch.setattr(module, "choose_config", stop)
        if getattr(module, "require_gpu", None) is require:
            monkeypatch.setattr(module, "require_gpu", lambda *args, **options: None)
    with pytest.raises(Chosen) as found:
        call(str(wanted))
    assert found.value.args == (wanted,)
    for text in ("fast", "8", f"{wanted} fast", ""):
        with pytest.raises(ValueError, match=f"^unknown configuration '{text[:40]}"):
            call(text)
