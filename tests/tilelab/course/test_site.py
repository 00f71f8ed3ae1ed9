"""The pages of `make site`: whole, linked among themselves, readable, and in need of nobody."""

import base64
import contextlib
import html
import pathlib
import re
import shutil
import urllib.parse

import nbconvert
import nbformat
import pytest
from cases import cases
from view_pages import COLOURS, CROWDED, SCREENSHOTS, WAIT_MS, photograph

from tilelab import views
from tilelab.course import notebook, site

WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
WIDEST = {"width": 1920, "height": 1080}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAX+XDSwAAAABJRU5ErkJggg=="
VIEW = """function render({ model, el }) {
  const root = h("div", { class: "tiles-view tiles-dial" });
  const number = h("output", {}, String(model.get("data").count));
  if (model.get("data").count < 0) throw new Error("the dial ends at 0");
  root.append(number, h("button", { onclick: () => { number.textContent = Number(number.textContent) + 1; } }, "more"));
  if (!model.get("live")) root.append(model.get("data").text);
  el.append(root);
}
export default { render };
"""


@contextlib.contextmanager
def _templates():
    """Let nbconvert find its templates where packages lie on PYTHONPATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(pathlib.Path(nbconvert.__file__).parents[1] / "share/jupyter"))
        yield patch


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the paths of the pages of this course."""
    with _templates():
        return site.write_pages(tmp_path_factory.mktemp("site"))


@pytest.fixture
def small_page(tmp_path):
    """Return a function that writes the page of one code cell with these outputs, and returns its path."""
    with _templates() as patch:
        folder = tmp_path / "views"
        folder.mkdir()
        for name in ("shared.js", "shared.css"):
            shutil.copy(views.FOLDER / name, folder)
        (folder / "dial.js").write_text(VIEW)
        (folder / "dial.css").write_text(".tiles-dial { border: 2px solid var(--accent); }\n")
        patch.setattr(views, "FOLDER", folder)
        patch.setattr(site, "ROOT", tmp_path)
        views.read_module.cache_clear()
        views.read_style.cache_clear()
        (tmp_path / "notebooks").mkdir()
        (tmp_path / "README.md").write_text("# Title\n")

        def write(*outputs, source="show()"):
            cells = [
                nbformat.v4.new_markdown_cell(
                    "# `One` page\n\n## A *dial*\n\n### Parts\n\nText "
                    "<details><summary>Answer</summary>Because.</details>"
                ),
                nbformat.v4.new_code_cell(source, outputs=list(outputs)),
            ]
            written = nbformat.v4.new_notebook(cells=cells, metadata=notebook.METADATA)
            nbformat.write(written, tmp_path / "notebooks/one.ipynb")
            return site.write_pages(tmp_path / "pages")[1]

        yield write
    views.read_module.cache_clear()
    views.read_style.cache_clear()


def _output(kind="display_data", metadata=None, **data):
    data = {name.replace("_", "/", 1): value for name, value in data.items()}
    return nbformat.v4.new_output(kind, data, metadata=metadata or {})


def _view(count, text=""):
    stored = views.make_stored("dial", {"count": count, "text": text})
    return nbformat.v4.new_output("display_data", {**stored, "text/plain": "View(dial)"})


def _scripts(text):
    return re.findall(r"<script\b[^>]*>(.*?)</script>", text, re.S)


@pytest.mark.notebook
def test_every_page_needs_nobody_and_every_link_within_the_site_leads_somewhere(pages):
    stems = [path.stem for path in site.notebooks_in_order()]
    docs = [path.stem for path in pages if path.stem.startswith(("docs_", "deeper_"))]
    assert [page.stem for page in pages] == ["index", *stems, *docs]
    assert len(docs) == len([*(site.ROOT / "docs").rglob("*.md")])
    assert set(stems) == {path.stem for path in (site.ROOT / "notebooks").glob("*.ipynb")}
    texts = {page.name: page.read_text() for page in pages}
    anchors = {
        page: {html.unescape(name) for name in re.findall(r' id="([^"]*)"', text)}
        for page, text in texts.items()
    }
    for page, text in texts.items():
        contents, *others = _scripts(text)
        assert contents.strip() == (site.FOLDER / "site.js").read_text().strip(), page
        assert all(other.startswith(("\n(window.tilesViews", "(() => {\nconst el")) for other in others), page
        fetched = re.findall(
            r'(?:src="|<link[^>]*href="|url\(|@import )["\']?(?!data:)(https?:[^"\')]*)', text
        )
        assert not fetched, (page, fetched[:3])
        assert not re.search(r'src="(?!data:)', text), page
        for target, anchor in re.findall(r'href="([^":#]*)(?:#([^"]*))?"', text):
            assert not target or target in texts, (page, target)
            wanted = html.unescape(anchor)  # a browser looks for it as it stands, then decoded
            there = anchors[target or page]
            assert not anchor or {wanted, urllib.parse.unquote(wanted)} & there, (page, target, anchor)
        assert all(re.search(r'\balt="[^"]+"', image) for image in re.findall(r"<img\b[^>]*>", text)), page
        assert not re.search(
            r"\b(VBox|HBox|Panel|Planner|Tree|View)\(",
            re.sub(r'<div class="input.*?</pre>', "", text, flags=re.S),
        ), page
        prose = re.sub(r"<(style|script|pre|code)\b.*?</\1>", "", text, flags=re.S)
        assert not re.search(r"\$[^$\s][^$]*\$|\\\(|\\\[", prose), (
            f"{page} has a formula, which nothing here draws"
        )
        assert text.count('rel="next"') == (page != pages[-1].name)
        assert text.count('rel="prev"') == (page != "index.html")
        sidebar = text[: text.index("<main")]
        assert [*dict.fromkeys(re.findall(r'href="([\w.-]+html)"', sidebar))] == list(texts), page
        assert sidebar.count(f'href="{page}" aria-current="page"') == 1


def test_a_view_takes_the_place_of_its_picture_and_folds_its_table(small_page):
    still = _output(image_png=PNG, metadata={"image/png": {"alt": "a dial at 3"}})
    text = small_page(
        _view(3, "</script><!--<script>"),
        still,
        _output(text_html="<table><tr><td>3</td></tr></table>"),
        _view(4),
        _output(image_png=PNG),
        source="%%cuda dial\n__global__ void dial() {}",
    ).read_text()
    assert "View(dial)" not in text and text.count("a dial at 3") == 1
    assert re.search(r'<div><div class="picture"><img [^>]*></div></div><script>', text)
    assert re.search(r"<details[^>]*><summary>The same as a table</summary><div class=\"wide\"><table>", text)
    scripts = _scripts(text)
    assert len(scripts) == 4 and sum("function render" in script for script in scripts) == 1
    assert text.count(".tiles-dial {") == 1 and "\\u003c/script>" in text
    assert '<span class="kt">void</span>' in text  # highlighted as CUDA C++


def test_a_cell_may_leave_an_unknown_view_only_as_an_error(small_page):
    with pytest.raises(ValueError, match="unknown view 'nothing'; choose one of dial."):
        small_page(nbformat.v4.new_output("display_data", views.make_stored("nothing", 1)))


@pytest.mark.parametrize("stored", [{"view": "dial", "json": '{"count": 3, "te'}, {"view": "dial"}, "dial"])
def test_a_stored_view_that_is_damaged_names_its_notebook(small_page, stored):
    says = "the page of one cannot be made: a stored view is damaged; run its cell"
    with pytest.raises(ValueError, match=says):
        small_page(nbformat.v4.new_output("display_data", {views.MIME: stored}))


@cases("name, kind, content", ("dot.png", "png", base64.b64decode(PNG)), ("p/dot.svg", "svg+xml", b"<svg/>"))
def test_a_picture_of_a_text_is_embedded_and_one_that_is_missing_is_named(
    small_page, tmp_path, name, kind, content
):
    (tmp_path / "README.md").write_text(f"# Title\n\n![a dot]({name})\n")
    (tmp_path / "p").mkdir()
    (tmp_path / name).write_bytes(content)
    small_page()
    data = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    assert f'<img src="{data}" alt="a dot"' in (tmp_path / "pages/index.html").read_text()
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"the picture .*{name} does not exist."):
        small_page()


def test_widgets_become_a_note_and_every_picture_is_described(small_page):
    text = small_page(
        _output(text_plain="VBox(children=(HBox(children=(Dropdown(options=…", kind="execute_result"),
        _output(text_plain="Panel(bulk copy)"),
        _output(text_plain="'a text (of mine)'"),
        _output(image_png=PNG),
        _output(kind="execute_result", text_plain="Report(fine=True)"),
        _output(text_html="<style>pre { color: red }</style><script>run()</script><b>kept</b>"),
    )
    text = text.read_text()
    assert "VBox(" not in text and "Panel(" not in text and text.count(site.WIDGET_NOTE) == 2
    assert "a text (of mine)" in text and "Report(fine=True)" in text and "<b>kept</b>" in text
    assert "<details><summary>Answer</summary>Because.</details>" in text
    assert "run()" not in text and "color: red" not in text
    assert 'alt="A picture of the section “Parts”"' in text
    found = re.findall(r'<li class="(h\d)"><a href="#([^"]*)">([^<]*)<', text)
    assert found == [("h2", "A-dial", "A dial"), ("h3", "Parts", "Parts")]
    assert "<title>One page</title>" in text


@cases(
    "arguments, said",
    ([""], "folder is empty; leave it out for build/site."),
    (["/dev/null"], "/dev/null cannot be written (File exists)."),
    (["--bogus"], "unrecognized arguments: --bogus"),
)
def test_a_refusal_is_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as stopped:
        site.main(arguments)
    assert stopped.value.code == 2 and capsys.readouterr().err == f"python -m tilelab.course.site: {said}\n"


@pytest.mark.parametrize("text", ["", "{}", "null", '{"nbformat": 4}'])
def test_a_file_that_is_no_notebook_is_one_line(monkeypatch, tmp_path, capsys, text):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "README.md").write_text("# Title\n")
    (tmp_path / "notebooks/empty.ipynb").write_text(text)
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        site.main([str(tmp_path / "pages")])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    assert "notebooks/empty.ipynb is not a notebook: " in said


def test_links_to_what_is_no_page_become_words():
    pages = [site.Page(path, None) for path in ("docs/deeper/y.md", "notebooks/x.ipynb", "README.md")]
    assert [page.stem for page in pages] == ["deeper_y", "x", "index"]
    rest = ' <a href="https://x.org">c</a> <a href="#d">d</a>'
    body = '<a href="../../notebooks/x.ipynb#P">a</a> <a href="../LICENSE">b</a>' + rest
    wanted = '<a href="x.html#P">a</a> b' + rest
    assert site._rewrite_links(body, pages[0], pages) == wanted
    there = wanted.replace(" b ", ' <a href="https://x.org/files/docs/LICENSE">b</a> ')
    assert site._rewrite_links(body, pages[0], pages, "https://x.org/files/") == there


def test_a_hosted_notebook_installs_the_course_and_finds_its_pictures():
    cell = nbformat.v4.new_markdown_cell("![a](pictures/x/a.svg) (pictures)")
    hosted = site._make_hosted(nbformat.v4.new_notebook(cells=[cell]), "owner/name")
    setup, shown = hosted.cells
    assert '%pip install -q "tiles-in-flight[hosted] @ git+https://github.com/owner/name"' in setup.source
    picture = "https://raw.githubusercontent.com/owner/name/main/notebooks/pictures/x/a.svg"
    assert shown.source == f"![a]({picture}) (pictures)" and "githubusercontent" not in cell.source
    nbformat.validate(hosted)


# Texts with too little contrast: WCAG 2.2 (1.4.3) asks for 4.5 to 1.
PALE = (
    "() => {"
    + COLOURS
    + """
    const pale = new Map();
    for (const element of document.querySelectorAll("body *")) {
        const text = [...element.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join("").trim();
        if (!text || element.closest("script, style, .tiles-view")) continue;
        const [ink, paper] = [rgba(getComputedStyle(element).color), behind(element)].map(luminance);
        const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        if (ratio < 4.5) pale.set(`${element.localName}.${element.className}, ${ratio.toFixed(1)} : 1`, text);
    }
    return [...pale];
}"""
)
PROPORTIONAL = """() => [...document.querySelectorAll("pre, pre *, code")].filter(element =>
    !/monospace/.test(getComputedStyle(element).fontFamily)).map(element => element.textContent.slice(0, 40))"""
# Elements that end beyond the window, outside of any box that scrolls.
OVERHANGING = """() => document.documentElement.scrollWidth <= innerWidth ? [] :
    [...document.querySelectorAll("main *")].filter(element =>
        element.getBoundingClientRect().right > innerWidth && !element.closest(".wide, .picture, pre"))
    .map(element => `${element.localName}.${element.className}: ${element.textContent.slice(0, 40)}`)"""
PLAIN_LINKS = """() => [...document.querySelectorAll("a:not(.anchor-link)")].filter(link =>
    getComputedStyle(link).textDecorationLine !== "underline" ||
    getComputedStyle(link).color === getComputedStyle(document.body).color).map(link => link.outerHTML)"""
# Characters per line of the paragraphs that fill several lines.
LINE_LENGTHS = """() => [...document.querySelectorAll(".rendered_html > p")].map(each => [
    each.innerText.length, Math.round(each.offsetHeight / parseFloat(getComputedStyle(each).lineHeight))])
    .filter(([length, lines]) => lines >= 5).map(([length, lines]) => length / (lines - 0.4))"""


@contextlib.contextmanager
def _opened(browser, size, scheme="light"):
    """Yield a page without a network; an error in its console, or a request for anything but a file, fails the test."""
    with contextlib.closing(browser.new_context(viewport=size, color_scheme=scheme, offline=True)) as context:
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        faults = []
        page.on(
            "console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(("file:", "data:")) else faults.append(asked.url),
        )
        yield page, faults


@pytest.mark.browser
def test_every_page_can_be_read(pages, browser):
    """Each page is loaded once: every second one in the narrow window, which then grows, and in the other theme."""
    lengths, panels, schemes = [], 0, ["dark", "light"]
    everywhere = {"overhanging": OVERHANGING, "crowded": CROWDED}
    once = everywhere | {"pale": PALE, "proportional": PROPORTIONAL, "plain": PLAIN_LINKS}
    with _opened(browser, WIDE) as (page, faults):
        for number, path in enumerate(pages):
            in_docs = path.stem.startswith(("docs_", "deeper_"))  # their pages are alike
            sizes = 1 if in_docs else 3 if "tiles-page-view" in path.read_text() else 2
            windows = [NARROW, WIDE, WIDEST][:sizes]  # only views use a window wider than the text
            windows = windows[:: -1 if number % 2 else 1]
            for size, scheme in zip(windows, schemes + schemes):
                page.set_viewport_size(size)
                page.emulate_media(color_scheme=scheme)
                if size is windows[0]:
                    page.goto(path.as_uri())
                looks = everywhere if in_docs or windows.index(size) == 2 else once
                if page.locator(".tiles-panel .tiles-cell").count():
                    panels += 1
                    page.wait_for_function("document.querySelector('.tiles-panel svg text')")
                found = {name: page.evaluate(look) for name, look in looks.items()}
                if any(found.values()) or faults:
                    page.screenshot(path=SCREENSHOTS / f"site-{path.stem}-{size['width']}-{scheme}.png")
                assert not any(found.values()) and not faults, (path.stem, size, found, faults)
                background = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (background != "rgb(255, 255, 255)") == (scheme == "dark")
                lengths += page.evaluate(LINE_LENGTHS) if size is WIDE else []
            schemes.reverse()
    assert panels
    assert 75 <= sorted(lengths)[len(lengths) // 2] <= 105  # the font differs between machines


@pytest.mark.browser
def test_the_sidebar_follows_the_reader_searches_and_chooses_a_theme(pages, browser):
    path = next(page for page in pages if page.stem == "08_ch14_gemm")
    with _opened(browser, WIDE) as (page, faults):
        page.goto(path.as_uri())
        contents = page.locator(".toc details")
        assert contents.get_attribute("open") is not None
        link = page.locator(".toc a", has_text="What you predicted")
        link.click()
        heading = page.locator("h2", has_text="What you predicted")
        page.wait_for_function(
            "document.querySelector('.toc [aria-current=location]')?.textContent === 'What you predicted'"
        )
        assert heading.bounding_box()["y"] < 100 and link.is_visible()

        theme = page.get_by_role("button", name="Theme")
        colours = "getComputedStyle(document.body).backgroundColor"
        view = "getComputedStyle(document.querySelector('.tiles-view')).backgroundColor"
        shown = []
        for _ in range(3):
            theme.click()
            shown.append((theme.inner_text(), page.evaluate(colours), page.evaluate(view)))
        white, black = "rgb(255, 255, 255)", "rgb(21, 25, 30)"
        assert shown == [
            ("Theme: light", white, white),
            ("Theme: dark", black, black),
            ("Theme: system", white, white),
        ]

        search, found = page.get_by_role("searchbox"), page.locator(".found")
        search.fill("zzz")
        page.wait_for_function("document.querySelector('.found').innerText === 'No sections'")
        search.fill("multicast cluster")
        found.locator("a").first.click()
        page.wait_for_url("**/04_ch10_tile_sharing.html#*")

        page.goto(path.as_uri())
        page.set_viewport_size(NARROW)
        page.wait_for_function("!document.querySelector('.toc details').open")
        page.locator(".toc summary").click()
        page.locator(".toc a", has_text="Exercises").click()
        # it would cover what it led to
        page.wait_for_function("!document.querySelector('.toc details').open")
        below = page.locator(".toc").bounding_box()
        assert below["y"] + below["height"] <= page.locator("h2", has_text="Exercises").bounding_box()["y"]

        picture = page.locator(".picture[data-reduced]").first
        widths = "box => [box.clientWidth, box.scrollWidth]"
        fits = picture.evaluate(widths)
        picture.click()
        assert fits[0] == fits[1] < picture.evaluate(widths)[1]
        picture.press("Enter")
        assert picture.evaluate(widths) == fits
        assert not faults


@pytest.mark.browser
def test_views_work_on_a_page_and_a_view_that_fails_leaves_its_picture(small_page, browser):
    still = _output(image_png=PNG, metadata={"image/png": {"alt": "a still"}})
    path = small_page(_view(3, "</script>"), still, _view(7), still, _view(-1), still)
    with _opened(browser, NARROW, "dark") as (page, faults):
        page.goto(path.as_uri())
        photograph(page, "site-view-390-dark", full_page=False)
        dials = page.locator(".tiles-dial")
        assert dials.all_inner_texts() == ["3more</script>", "7more"]
        dials.nth(1).get_by_role("button").click()
        assert dials.all_inner_texts() == ["3more</script>", "8more"]
        assert page.get_by_alt_text("a still").count() == 1
        assert len(faults) == 1 and "the dial ends at 0" in faults[0]
        assert not page.evaluate(OVERHANGING)
