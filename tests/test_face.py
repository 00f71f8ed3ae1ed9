"""Every topic with an operator shows the public face that CONTRIBUTING.md describes."""

import dataclasses
import functools
import importlib
import inspect
import typing

import pytest
import torch

from ch07 import bulk_copy, resample
from ch10 import tile_pipeline, wgmma_gemm
from ch14 import attention, blockscaled, descriptors, fp4_decode, fp8_gemm, gemm, mx_formats
from tilelab.runtime import build, device, operands

TOPICS = ("ch07.bulk_copy", "ch07.resample", "ch10.tile_pipeline", "ch10.wgmma_gemm", "ch14.descriptors")
TOPICS += ("ch14.gemm", "ch14.attention", "ch14.mx_formats", "ch14.fp8_gemm", "ch14.fp4_decode", "ch14.moe")
TOPICS += ("ch14.blockscaled", "ch14.blockscaled.emulated", "ch14.blockscaled.native")


@pytest.fixture(scope="module")
def topics():
    return [importlib.import_module(name) for name in TOPICS]


def public_functions(topic):
    names = getattr(topic, "__all__", [name for name in vars(topic) if not name.startswith("_")])
    found = {name: getattr(topic, name, None) for name in names}
    return {
        name: function
        for name, function in found.items()
        if inspect.isfunction(function) and function.__module__.startswith(topic.__name__.rpartition(".")[0])
    }


def test_every_topic_has_the_face(topics):
    missing = [
        f"{topic.__name__}.{name}"
        for topic in topics
        for name in ("spec", "prepare", "configs", "job")
        if not callable(getattr(topic, name, None))
    ]
    assert missing == []


def test_names_in_all_exist(topics):
    assert [
        f"{topic.__name__}.{name}"
        for topic in topics
        for name in getattr(topic, "__all__", ())
        if not hasattr(topic, name)
    ] == []


def test_configs_are_named_frozen_dataclasses(topics):
    for topic in topics:
        named = topic.configs()
        assert isinstance(named, dict) and named and all(isinstance(name, str) for name in named), topic
        for config in named.values():
            assert dataclasses.is_dataclass(config) and not isinstance(config, type), config
            assert type(config).__dataclass_params__.frozen, f"{type(config).__name__} can be changed"


def test_prepare_returns_a_launch(topics):
    for topic in topics:
        parameters = inspect.signature(topic.prepare).parameters
        assert parameters["out"].default is None and parameters["config"].default == "best", topic
        returned = typing.get_type_hints(topic.prepare)["return"]
        assert isinstance(returned, type) and issubclass(returned, operands.Launch), topic


def test_every_config_has_a_job(topics):
    for topic in topics:
        assert list(inspect.signature(topic.job).parameters)[:2] == ["config", "target"], topic
        for name, config in topic.configs().items():
            assert isinstance(topic.job(config, "sm_90a"), build.Job), (topic, name)


def test_public_functions_are_fully_typed(topics):
    for topic in (topic for topic in topics if hasattr(topic, "__all__")):
        for name, function in public_functions(topic).items():
            parts = {**inspect.signature(function).parameters, "return": None}
            assert parts.keys() <= function.__annotations__.keys(), f"{topic.__name__}.{name}"


def test_public_functions_are_described_by_what_they_do(topics):
    for topic in topics:
        for name, function in public_functions(topic).items():
            words = (function.__doc__ or "").split()
            assert words, f"{topic.__name__}.{name}: {words[:5]}"
            assert words[0] not in ("What", "Why", "How", "Whether"), f"{topic.__name__}.{name}: {words[:5]}"


def test_every_operator_refuses_a_view_that_negates():
    """A kernel reads memory by address and would take `torch._neg_view(x)` for x."""
    with torch.device("cpu" if device.current().capability is None else "cuda"):
        for call in list_calls_with_a_negated_view():
            with pytest.raises(ValueError, match="is a view that conjugates or negates"):
                call()


def list_calls_with_a_negated_view():
    def random(*shape, dtype=torch.float16):
        return torch.randn(*shape).to(dtype)

    halves = [random(64, 64), random(64, 64)]
    bf16 = random(32, 64, dtype=torch.bfloat16)
    ones = torch.ones(1, 1)
    fp8, zeros = random(128, 128).to(torch.float8_e4m3fn), torch.zeros(16, 32, dtype=torch.uint8)
    packed = mx_formats.quantise(bf16, "nvfp4")
    of_packed = [
        dataclasses.replace(packed, **{name: torch._neg_view(tensor)})
        for name, tensor in packed.tensors().items()
    ]
    calls = [
        (bulk_copy.prepare, [halves[0]]),
        (lambda x, y: bulk_copy.prepare(x, y=y), halves),
        (resample.prepare, [torch.randn(1, 8, 16), torch.arange(8.0)[None], torch.arange(4.0)[None]]),
        (functools.partial(tile_pipeline.prepare, "copy"), [torch.randn(32, 32)]),
        (lambda a, b: wgmma_gemm.prepare(a, b.T), [bf16, bf16]),
        (lambda x, y: descriptors.prepare("add", x, y=y), halves),
        (gemm.prepare, halves),
        (
            lambda a, b, *scales: gemm.prepare(a, b.T, scale_a=scales[0], scale_b=scales[1]),
            [fp8, fp8, ones, ones],
        ),
        (lambda out: gemm.prepare(*halves, out=out), [random(64, 64)]),
        (attention.prepare, [random(1, 1, 16, 64)] * 3),
        (mx_formats.prepare, [bf16]),
        (lambda a, b, scale: fp8_gemm.prepare(a, b.T, scale, ones), [fp8, fp8, ones]),
        (fp4_decode.prepare, [bf16[:1], zeros, zeros[:, :2].contiguous()]),
    ]
    refused = [
        functools.partial(prepare, *given[:at], torch._neg_view(given[at]), *given[at + 1 :])
        for prepare, given in calls
        for at in range(len(given))
    ]
    for prepare in (
        mx_formats.prepare,
        *(
            functools.partial(lambda op, a: op.prepare(a, packed.T), op)
            for op in (blockscaled, blockscaled.emulated, blockscaled.native)
        ),
    ):
        refused += [functools.partial(prepare, each) for each in of_packed]
    return refused
