"""The page of the demo shows a recorded panel before its kernel has one; test_lab_in_browser.py opens it."""

import json

import pytest

from tilelab.course import demo


def test_the_first_view_is_the_panel_with_which_the_demo_opens(tmp_path):
    first = demo.make_first_view()
    opened = (demo.ROOT / "notebooks/demo/panel.ipynb").read_text()
    for value in ("grid of 96", "4096³"):
        assert f'=\\"{value}\\"' in opened and f'":{json.dumps(value)}' in first
    assert '"alone":true' in first and "tiles-page-view" in first
    empty = tmp_path / "empty.ipynb"
    empty.write_text('{"cells": [{"outputs": [{"data": {}}]}]}')
    with pytest.raises(ValueError, match="stores no panel"):
        demo.make_first_view(empty)
