"""The pages of `make site`: whole, linked among themselves, and in need of nobody."""

import re

import pytest

from tilelab import site


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return site.write(tmp_path_factory.mktemp("site"))


def test_a_page_for_the_readme_and_for_each_notebook(pages):
    assert [page.stem for page in pages] == ["index", *(path.stem for path in site.notebooks())]
    assert {path.stem for path in site.notebooks()} == {path.stem for path in (site.ROOT / "notebooks").glob("*.ipynb")}


def test_nothing_is_fetched_and_nothing_runs(pages):
    for page in pages:
        text = page.read_text()
        assert "<script" not in text, page.name
        fetched = re.findall(r'(?:src="|<link[^>]*href="|url\(|@import )["\']?(?!data:)(https?:[^"\')]*)', text)
        assert not fetched, (page.name, fetched[:3])
        assert not re.search(r'src="(?!data:)', text), page.name


def test_every_link_within_the_site_leads_somewhere(pages):
    texts = {page.name: page.read_text() for page in pages}
    for name, text in texts.items():
        for target, anchor in re.findall(r'href="([^":#]*)(?:#([^"]*))?"', text):
            assert not target or target in texts, (name, target)
            if anchor:
                assert f'id="{anchor}"' in texts[target or name], (name, target, anchor)


def test_links_to_what_is_no_page_become_words():
    assert site._linked("[a](notebooks/x.ipynb#Part) [b](LICENSE) [c](https://x.org) [d](#here)") == \
        "[a](x.html#Part) b [c](https://x.org) [d](#here)"
