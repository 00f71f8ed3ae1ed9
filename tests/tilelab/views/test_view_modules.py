"""A view can use functions of another one, without an import and without a clash of names."""

import pytest

from tilelab import views


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in {
        "shared.js": "const shared = 1;",
        "shared.css": ".shared {}",
        "part.css": ".part {}",
        "part.js": f"const own = 2;\nfunction draw() {{}}\nfunction render() {{}}\n\n{views.EXPORT}\n",
        "whole.js": f"// uses: draw from part\nconst own = 3;\nfunction render() {{}}\n{views.EXPORT}\n",
        "whole.css": ".whole {}",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(views, "FOLDER", tmp_path)
    for read in views.read_module, views.read_style:
        read.cache_clear()
    yield tmp_path
    for read in views.read_module, views.read_style:
        read.cache_clear()


def test_a_used_view_is_a_function_of_its_own(folder):
    module = views.read_module("whole")
    assert module.index("shared") < module.index("const { draw } = (() => {") < module.index("const own = 3")
    assert "return { draw };" in module and module.count(views.EXPORT) == 1
    assert views.read_style("whole").split() == [".shared", "{}", ".part", "{}", ".whole", "{}"]


def test_other_views_stay_as_they_were(folder):
    assert "=>" not in views.read_module("part")
    with pytest.raises(ValueError, match="unknown view 'none'; choose one of part, whole"):
        views.read_module("none")
