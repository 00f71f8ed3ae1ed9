"""Every topic with an operator shows the public face that CONTRIBUTING.md describes."""

import dataclasses
import importlib
import inspect
import typing

import pytest

from tilelab import build, operands

TOPICS = ("ch07.bulk_copy", "ch07.resample", "ch10.tile_pipeline", "ch10.wgmma_gemm", "ch14.descriptors", "ch14.gemm",
          "ch14.attention", "ch14.mx_formats", "ch14.blockscaled", "ch14.blockscaled.fp8", "ch14.blockscaled.emulated",
          "ch14.blockscaled.native", "ch14.blockscaled.decode")


@pytest.fixture(params=TOPICS)
def topic(request):
    return importlib.import_module(request.param)


def public_functions(topic):
    names = getattr(topic, "__all__", [name for name in vars(topic) if not name.startswith("_")])
    found = {name: getattr(topic, name, None) for name in names}
    return {name: function for name, function in found.items()
            if inspect.isfunction(function) and function.__module__.startswith(topic.__name__.rpartition(".")[0])}


@pytest.mark.parametrize("name", ["spec", "prepare", "configs", "job"])
def test_has_the_face(topic, name):
    assert callable(getattr(topic, name, None)), f"{topic.__name__} has no {name}()"


def test_names_in_all_exist(topic):
    assert [name for name in getattr(topic, "__all__", ()) if not hasattr(topic, name)] == []


def test_configs_are_named_frozen_dataclasses(topic):
    named = topic.configs()
    assert isinstance(named, dict) and named and all(isinstance(name, str) for name in named)
    for config in named.values():
        assert dataclasses.is_dataclass(config) and not isinstance(config, type), config
        assert type(config).__dataclass_params__.frozen, f"{type(config).__name__} can be changed"


def test_prepare_returns_a_launch(topic):
    parameters = inspect.signature(topic.prepare).parameters
    assert parameters["out"].default is None and parameters["config"].default == "best"
    returned = typing.get_type_hints(topic.prepare)["return"]
    assert isinstance(returned, type) and issubclass(returned, operands.Launch)


def test_every_config_has_a_job(topic):
    assert list(inspect.signature(topic.job).parameters)[:2] == ["config", "target"]
    for name, config in topic.configs().items():
        assert isinstance(topic.job(config, "sm_90a"), build.Job), name


def test_public_functions_are_described_by_what_they_do(topic):
    for name, function in public_functions(topic).items():
        words = (function.__doc__ or "").split()
        assert words and words[0] not in ("What", "Why", "How", "Whether"), f"{topic.__name__}.{name}: {words[:5]}"
