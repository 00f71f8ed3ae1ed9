"""Do the imports of version 0.1 keep working? Programs that people wrote then use them."""

import importlib

import pytest

import tilelab


@pytest.mark.parametrize("name", tilelab.MOVED)
def test_a_module_of_tilelab_is_found_by_its_old_name(name):
    place = tilelab.MOVED[name]
    assert getattr(tilelab, name) is importlib.import_module(
        f"tilelab.{place}" if "." in place else f"tilelab.{place}.{name}"
    )


def test_the_report_on_a_tensor_map_is_found_by_its_old_name():
    old = importlib.import_module("ch10.tile_pipeline.map_report")
    assert old is importlib.import_module("ch10.tile_pipeline.lesson.map_report")
