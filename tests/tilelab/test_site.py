"""The pages of `make site`: whole, linked among themselves, and in need of nobody."""

import html
import pathlib
import re
import urllib.parse

import nbconvert
import pytest

from tilelab import site


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every page, which takes seconds: tests of them are in the tier of the notebooks."""
    with pytest.MonkeyPatch.context() as patch:  # where packages lie on PYTHONPATH, so do nbconvert's templates
        patch.setenv("JUPYTER_PATH", str(pathlib.Path(nbconvert.__file__).parents[1] / "share/jupyter"))
        return site.write_pages(tmp_path_factory.mktemp("site"))


@pytest.mark.notebook
def test_a_page_for_the_readme_and_for_each_notebook(pages):
    stems = [path.stem for path in site.notebooks_in_order()]
    assert [page.stem for page in pages] == ["index", *stems]
    assert set(stems) == {path.stem for path in (site.ROOT / "notebooks").glob("*.ipynb")}


@pytest.mark.notebook
def test_nothing_is_fetched_and_nothing_runs(pages):
    for page in pages:
        text = page.read_text()
        assert "<script" not in text, page.name
        fetched = re.findall(r'(?:src="|<link[^>]*href="|url\(|@import )["\']?(?!data:)(https?:[^"\')]*)', text)
        assert not fetched, (page.name, fetched[:3])
        assert not re.search(r'src="(?!data:)', text), page.name


@pytest.mark.notebook
def test_every_link_within_the_site_leads_somewhere(pages):
    texts = {page.name: page.read_text() for page in pages}
    for page, text in texts.items():
        for target, anchor in re.findall(r'href="([^":#]*)(?:#([^"]*))?"', text):
            assert not target or target in texts, (page, target)
            if anchor:  # a browser looks for it as it stands, then decoded
                there = {html.unescape(name) for name in re.findall(r' id="([^"]*)"', texts[target or page])}
                wanted = html.unescape(anchor)
                assert {wanted, urllib.parse.unquote(wanted)} & there, (page, target, anchor)


@pytest.mark.parametrize("arguments, said", [
    ([""], "folder is empty; leave it out for build/site."),
    (["/dev/null"], "/dev/null cannot be written (File exists)."),
    (["--bogus"], "unrecognized arguments: --bogus")])
def test_a_refusal_is_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as stopped:
        site.main(arguments)
    assert stopped.value.code == 2 and capsys.readouterr().err == f"python -m tilelab.site: {said}\n"


@pytest.mark.parametrize("text", ["", "{}", "null", '{"nbformat": 4}'])
def test_a_file_that_is_no_notebook_is_one_line(monkeypatch, tmp_path, capsys, text):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "README.md").write_text("# Title\n")
    (tmp_path / "notebooks/empty.ipynb").write_text(text)
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        site.main([str(tmp_path / "pages")])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and "notebooks/empty.ipynb is not a notebook: " in said


def test_links_to_what_is_no_page_become_words():
    body = '<a href="notes/x.ipynb#P">a</a> <a href="LICENSE">b</a> <a href="https://x.org">c</a> <a href="#d">d</a>'
    wanted = '<a href="x.html#P">a</a> b <a href="https://x.org">c</a> <a href="#d">d</a>'
    assert site._rewrite_links(body) == wanted
