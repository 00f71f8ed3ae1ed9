"""The pages of `make site`: whole, linked among themselves, and in need of nobody."""

import html
import pathlib
import re
import subprocess
import sys
import urllib.parse

import nbconvert
import pytest

from tilelab import notebook, site


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:  # where packages lie on PYTHONPATH, so do nbconvert's templates
        patch.setenv("JUPYTER_PATH", str(pathlib.Path(nbconvert.__file__).parents[1] / "share/jupyter"))
        return site.write_pages(tmp_path_factory.mktemp("site"))


def test_a_page_for_the_readme_and_for_each_notebook(pages):
    stems = [path.stem for path in site.notebooks_in_order()]
    assert [page.stem for page in pages] == ["index", *stems]
    assert set(stems) == {path.stem for path in (site.ROOT / "notebooks").glob("*.ipynb")}


def test_nothing_is_fetched_and_nothing_runs(pages):
    for page in pages:
        text = page.read_text()
        assert "<script" not in text, page.name
        fetched = re.findall(r'(?:src="|<link[^>]*href="|url\(|@import )["\']?(?!data:)(https?:[^"\')]*)', text)
        assert not fetched, (page.name, fetched[:3])
        assert not re.search(r'src="(?!data:)', text), page.name


def test_every_link_within_the_site_leads_somewhere(pages):
    texts = {page.name: page.read_text() for page in pages}
    for page, text in texts.items():
        for target, anchor in re.findall(r'href="([^":#]*)(?:#([^"]*))?"', text):
            assert not target or target in texts, (page, target)
            if anchor:  # a browser looks for it as it stands, then decoded
                there = {html.unescape(name) for name in re.findall(r' id="([^"]*)"', texts[target or page])}
                wanted = html.unescape(anchor)
                assert {wanted, urllib.parse.unquote(wanted)} & there, (page, target, anchor)


@pytest.mark.parametrize("argument, status, said", [
    ("", 2, "folder is empty"), ("/dev/null", 2, "/dev/null cannot be written"),
    ("--bogus", 2, "unrecognized arguments"), ("--help", 0, "")])
def test_the_command_line(tmp_path, argument, status, said):
    done = subprocess.run([sys.executable, "-m", "tilelab.site", argument], capture_output=True, text=True,
                          cwd=tmp_path, env=notebook.child_env(), check=False)
    assert done.returncode == status and said in done.stderr and done.stderr.count("\n") == bool(said)
    assert not list(tmp_path.iterdir())


def test_links_to_what_is_no_page_become_words():
    body = '<a href="notes/x.ipynb#P">a</a> <a href="LICENSE">b</a> <a href="https://x.org">c</a> <a href="#d">d</a>'
    wanted = '<a href="x.html#P">a</a> b <a href="https://x.org">c</a> <a href="#d">d</a>'
    assert site._rewrite_links(body) == wanted
