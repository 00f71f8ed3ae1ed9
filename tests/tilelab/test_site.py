"""The pages of `make site`: whole, linked among themselves, and in need of nobody."""

import html
import pathlib
import re
import urllib.parse

import nbconvert
import pytest

from tilelab import site


@pytest.mark.notebook
def test_every_page_needs_nobody_and_every_link_within_the_site_leads_somewhere(monkeypatch, tmp_path):
    # Where packages lie on PYTHONPATH, so do nbconvert's templates.
    monkeypatch.setenv("JUPYTER_PATH", str(pathlib.Path(nbconvert.__file__).parents[1] / "share/jupyter"))
    pages = site.write_pages(tmp_path)
    stems = [path.stem for path in site.notebooks_in_order()]
    assert [page.stem for page in pages] == ["index", *stems]
    assert set(stems) == {path.stem for path in (site.ROOT / "notebooks").glob("*.ipynb")}
    texts = {page.name: page.read_text() for page in pages}
    anchors = {page: {html.unescape(name) for name in re.findall(r' id="([^"]*)"', text)}
               for page, text in texts.items()}
    for page, text in texts.items():
        assert "<script" not in text, page
        fetched = re.findall(r'(?:src="|<link[^>]*href="|url\(|@import )["\']?(?!data:)(https?:[^"\')]*)', text)
        assert not fetched, (page, fetched[:3])
        assert not re.search(r'src="(?!data:)', text), page
        for target, anchor in re.findall(r'href="([^":#]*)(?:#([^"]*))?"', text):
            assert not target or target in texts, (page, target)
            wanted = html.unescape(anchor)  # a browser looks for it as it stands, then decoded
            there = anchors[target or page]
            assert not anchor or {wanted, urllib.parse.unquote(wanted)} & there, (page, target, anchor)


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
