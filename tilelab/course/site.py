"""Write the README, the executed notebooks and `docs` as pages without a network: `python -m tilelab.course.site`.

Each page holds its style sheet, its pictures and the recorded data of its interactive views. The views (tilelab/views)
and the sidebar (site.js) bring the only scripts of a page. The search reads the texts of all sections from `search.js`.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import html
import json
import mimetypes
import pathlib
import posixpath
import re

import nbformat
from nbconvert import HTMLExporter, TemplateExporter
from nbconvert.filters import Highlight2HTML
from traitlets.config import Config

from tilelab import ROOT, cli, views
from tilelab.course import notebook
from tilelab.runtime import device

FOLDER = pathlib.Path(__file__).parent
FILE = re.compile(r'<a\b[^>]*\bhref="(?!\w+:|#)([^"#]*)(#[^"]*)?"[^>]*>(.*?)</a>', re.S)
SETUP = """# Install the course on a host of notebooks; restart the kernel if the host asks for it. Without a GPU, and
# on one older than Hopper such as a T4, kernels run in the emulator or the interpreter, and times come from records.
%pip install -q "tiles-in-flight[hosted] @ git+https://github.com/{repository}"
"""
ANCHOR = '<a class="anchor-link" href="#{name}" aria-label="Link to the section {words}">¶</a>'
SECTION = re.compile(r'<h[1-6] id="([^"]*)">(.*?) <a class="anchor-link".*?</h[1-6]>', re.S)
HEADING = re.compile(r'<h([1-6]) id="([^"]*)">(.*?)<a class="anchor-link"[^>]*>.*?</a></h\1>', re.S)
WIDGET_TEXT = re.compile(r"[A-Z]\w*\(.*")  # all that a saved notebook keeps of a widget: "Panel(bulk copy)"
WIDGET_NOTE = '<p class="note">In a running notebook this cell shows controls here.</p>'
PICTURES = ("image/svg+xml", "image/png", "image/jpeg")
# nbconvert's embed_images would close each tag of inline HTML at once: <details></details><summary></summary>.
CONFIG = Config(HTMLExporter={"template_name": "basic", "exclude_output_prompt": True})
CONFIG.HighlightMagicsPreprocessor.languages = {"%%cuda": "cuda"}


@dataclasses.dataclass
class Page:
    """A page of the site: the path of its source in the repository, and the notebook that it shows."""

    source: str
    notebook: nbformat.NotebookNode

    @property
    def stem(self) -> str:
        """Return the name of the page's file without the ending."""
        folder, name = posixpath.split(self.source.rpartition(".")[0])
        return {"": "index", "notebooks": name}.get(folder, f"{posixpath.basename(folder)}_{name}")

    @property
    def is_lesson(self) -> bool:
        """Return whether the page is a notebook."""
        return self.source.endswith(".ipynb")

    def title(self) -> str:
        """Return the place in the reading order and the text of the first heading, or the name of the page."""
        headings = (re.search(r"^# +(.+)", cell.source, re.M) for cell in self.notebook.cells)
        title = next((re.sub("[`*]", "", found[1]) for found in headings if found), self.stem)
        return f"{int(self.stem[:2])}. {title}" if self.stem[:2].isdigit() else title


def notebooks_in_order() -> list[pathlib.Path]:
    """Return the notebooks in the README's order, then those that it does not name."""
    readme, folder = (ROOT / "README.md").read_text(), ROOT / "notebooks"
    named = [folder / name for name in dict.fromkeys(re.findall(r"\(notebooks/(\w+\.ipynb)\)", readme))]
    return named + sorted(path for path in folder.glob("*.ipynb") if path not in named)


def _read_page(path: pathlib.Path):
    """Return a notebook, or a Markdown file as one."""
    if path.suffix == ".md":
        return nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_markdown_cell(path.read_text(encoding="utf-8"))]
        )
    try:
        return nbformat.read(path, 4)
    except Exception as error:  # nbformat raises errors of several libraries
        raise ValueError(f"{path} is not a notebook: {device.first_line(error)}.") from error


def _rewrite_links(body: str, page: Page, pages: list[Page], files: str = "") -> str:
    """Point a page's links at other pages, and links to other files of the repository below the address `files`.

    Without an address these become plain text.
    """
    stems = {other.source: other.stem for other in pages}

    def rewrite(found: re.Match) -> str:
        target, anchor, words = found.groups(default="")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.source), target))
        if path not in stems and not files:
            return words
        there = f"{stems[path]}.html" if path in stems else f"{files}{path}"
        return f'<a href="{there}{anchor}">{words}</a>'

    return FILE.sub(rewrite, body)


def _make_hosted(source, repository: str):
    """Return a copy of a notebook that needs no copy of the repository: its first cell installs the course."""
    hosted = copy.deepcopy(source)
    for cell in hosted.cells:
        if cell.cell_type == "markdown":
            pictures = f"(https://raw.githubusercontent.com/{repository}/main/notebooks/"
            cell.source = re.sub(r"\((?=pictures/)", pictures, cell.source)
    hosted.cells.insert(0, nbformat.v4.new_code_cell(SETUP.format(repository=repository)))
    if hosted.nbformat_minor < 5:
        del hosted.cells[0]["id"]
    return hosted


def _find_picture(output) -> str:
    """Return the MIME type of the picture in an output, or ""."""
    return next((kind for kind in PICTURES if kind in output.get("data", {})), "")


def _is_widget(output) -> bool:
    """Return whether an output holds nothing but the text of a widget, such as "VBox(children=…"."""
    data = output.get("data", {})
    shown = output.output_type == "display_data" or data.get("text/plain", "").startswith(("VBox(", "HBox("))
    return set(data) == {"text/plain"} and shown and bool(WIDGET_TEXT.fullmatch(data["text/plain"]))


def _html_output(text: str):
    return nbformat.v4.new_output("display_data", {"text/html": text})


def _picture_element(output, kind: str) -> str:
    text = output.metadata[kind]["alt"]
    if kind == "image/svg+xml":
        return f'<div class="picture" role="img" aria-label="{html.escape(text)}">{output.data[kind]}</div>'
    data = "".join(output.data[kind].split())
    size = f' width="{output.metadata[kind].width}"' if "width" in output.metadata[kind] else ""
    return f'<div class="picture"><img src="data:{kind};base64,{data}" alt="{html.escape(text)}"{size}></div>'


def _fold_table(output):
    """Return a table as an output that the reader unfolds."""
    table = output.data.get("text/html") or f"<pre>{html.escape(output.data['text/plain'])}</pre>"
    summary = "<summary>The same as a table</summary>"
    return _html_output(f'<details class="rendered_html">{summary}{table}</details>')


class _Exporter(HTMLExporter):
    """HTMLExporter without its second reading of each page, which takes two thirds of the time and changes nothing."""

    def from_notebook_node(self, nb, resources=None, **options):
        self.register_filter("highlight_code", Highlight2HTML(pygments_lexer="ipython3", parent=self))
        return TemplateExporter.from_notebook_node(self, nb, resources, **options)


class _Views:
    """The interactive views of one page. nbconvert sees a placeholder for each, so that it leaves their code alone."""

    def __init__(self):
        self.parts: list[str] = []
        self._names: set[str] = set()

    def add(self, view: dict, still: str):
        """Return an output that stands for a view. `still` is the HTML of the picture for readers without scripts."""
        name, data = views.read_stored(view)
        self.parts.append(views.make_page_part(name, data, still=still, with_code=name not in self._names))
        self._names.add(name)
        return _html_output(f'<div data-view="{len(self.parts) - 1}"></div>')

    def put_back(self, body: str) -> str:
        return re.sub(r'<div data-view="(\d+)"></div>', lambda found: self.parts[int(found[1])], body)


def _prepare_outputs(outputs: list, heading: str, page_views: _Views) -> list:
    """Return the outputs of a cell as the page shows them.

    A view takes the place of the picture that it left in the notebook, and its table is folded. The text of a widget
    becomes a note. A picture without alternative text is described by the heading above it.
    """
    for output in outputs:
        output.get("data", {}).pop(notebook.WIDGET, None)
        if kind := _find_picture(output):
            described = output.metadata.setdefault(kind, nbformat.NotebookNode())
            described.alt = described.get("alt") or f"A picture of the section “{heading}”"
    prepared, rest = [], list(outputs)
    while rest:
        output = rest.pop(0)
        if view := output.get("data", {}).get(views.MIME):
            still = ""
            if rest and (kind := _find_picture(rest[0])):
                still = _picture_element(rest.pop(0), kind)
            prepared.append(page_views.add(view, still))
            after = set(rest[0].get("data", {})) if rest else set()
            if {"text/html", "text/plain"} & after and views.MIME not in after:
                prepared.append(_fold_table(rest.pop(0)))
        else:
            prepared.append(_html_output(WIDGET_NOTE) if _is_widget(output) else output)
    return prepared


def _prepare_notebook(source, page_views: _Views) -> None:
    # %%cuda needs IPython's lexer
    source.metadata.language_info = {"name": "python", "pygments_lexer": "ipython3"}
    heading = ""
    for cell in source.cells:
        if cell.cell_type == "markdown":
            heading = ([heading] + re.findall(r"^#+ +(.+)", cell.source, re.M))[-1]
        elif cell.cell_type == "code":
            cell.outputs = _prepare_outputs(cell.outputs, heading, page_views)


def _embed_picture(element: str, folder: pathlib.Path) -> str:
    """Return an <img> element in a box that scrolls, with the picture's data in place of the name of its file."""

    def embed(source: re.Match) -> str:
        path = folder / source[1]
        if not path.is_file():
            raise ValueError(f"the picture {path} does not exist.")
        data = base64.b64encode(path.read_bytes()).decode()
        return f'src="data:{mimetypes.guess_type(path)[0]};base64,{data}"'

    embedded = re.sub(r'src="(?!data:)([^":]*)"', embed, element)
    return f'<span class="picture">{embedded}</span>'


def _clean_body(body: str, page: Page) -> tuple[str, str]:
    """Return a page's body without foreign scripts and styles, with boxes for what is wide, and its contents.

    The contents link to the headings of the second and third level. Headings of a Markdown file are named as GitHub
    names them, because links lead there.
    """
    folder = (ROOT / page.source).parent
    body = re.sub(r"<(script|style)\b[^>]*>.*?</\1>|<link\b[^>]*>", "", body, flags=re.S)
    body = re.sub(r"<table\b.*?</table>", r'<div class="wide">\g<0></div>', body, flags=re.S)
    body = re.sub(r"<img\b[^>]*>", lambda found: _embed_picture(found[0], folder), body)
    seen, lines = set(), []

    def add_anchor(found: re.Match) -> str:
        level, name, text = found.groups()
        words = re.sub("<[^>]*>", "", text).strip()
        if not page.is_lesson:
            name = re.sub(r"[^\w -]", "", html.unescape(words).lower()).replace(" ", "-")
        while name in seen:
            name += "-again"
        seen.add(name)
        if level in "23" and words:
            lines.append(f'<li class="h{level}"><a href="#{name}">{words}</a></li>')
        anchor = ANCHOR.format(name=name, words=words.replace('"', "&quot;"))
        return f'<h{level} id="{name}">{text} {anchor}</h{level}>'

    body = HEADING.sub(add_anchor, body)
    return body, "\n".join(["<ul>", *lines, "</ul>"] if lines else [])


def _list_sections(body: str) -> list[list[str]]:
    """Return [anchor, heading, text] of each section of a page's body."""

    def read(part: str) -> str:
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", part)).split())

    parts = SECTION.split(body)
    return [
        [name, read(title), read(text)] for name, title, text in zip(parts[1::3], parts[2::3], parts[3::3])
    ]


def _write_sidebar(pages: list[Page], current: Page, contents: str) -> str:
    """Return the list of all pages in reading order, with the contents of the current one below it."""
    lines = []
    for page in pages:
        if page.source.startswith("docs/") and "To look up" not in "".join(lines):
            lines.append("</ul>\n<p>To look up</p>\n<ul>")
        here = (' aria-current="page"', contents) if page is current else ("", "")
        lines.append(f'<li><a href="{page.stem}.html"{here[0]}>{html.escape(page.title())}</a>{here[1]}</li>')
    return "\n".join(["<ul>", *lines, "</ul>"])


def _write_page(
    page: Page, pages: list[Page], exporter: HTMLExporter, repository: str
) -> tuple[str, list[list[str]]]:
    """Return the text of one of the pages, and its sections for the search."""
    title, page_views, at = page.title(), _Views(), pages.index(page)
    _prepare_notebook(page.notebook, page_views)
    body, _ = exporter.from_notebook_node(page.notebook, {"metadata": {"name": title}})
    body, contents = _clean_body(body, page)
    body = _rewrite_links(
        body, page, pages, f"https://github.com/{repository}/blob/main/" if repository else ""
    )
    elsewhere = ""
    if repository and page.is_lesson:
        colab = (
            f"https://colab.research.google.com/github/{repository}/blob/gh-pages/hosted/{page.stem}.ipynb"
        )
        elsewhere = (
            f'<p class="elsewhere"><a href="{colab}">Open in Colab</a> '
            f'<a href="hosted/{page.stem}.ipynb" download>Download for another host</a></p>'
        )
    links = [
        f'<a href="{other.stem}.html" rel="{kind}">{word}: {html.escape(other.title())}</a>'
        for kind, word, others in (("prev", "Before", pages[:at][-1:]), ("next", "Next", pages[at + 1 :][:1]))
        for other in others
    ]
    style, script = ((FOLDER / f"site.{kind}").read_text() for kind in ("css", "js"))
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip the list of lessons</a>
<div class="page">
<nav class="toc" aria-label="course"><details open><summary>Lessons and search</summary>
<div class="tools" hidden><input type="search" placeholder="Search the course" aria-label="Search the course">
<button type="button"></button></div>
<div class="found" role="status"></div>
{_write_sidebar(pages, page, contents)}</details></nav>
<script>
{script}</script>
<main id="main">
{elsewhere}{page_views.put_back(body)}
<nav class="pages" aria-label="before and next">{"".join(links)}</nav>
</main>
</div>
</body>
</html>
"""
    return text, _list_sections(body)


def write_pages(folder: pathlib.Path, repository: str = "") -> list[pathlib.Path]:
    """Write `index.html`, from the README, a page for each notebook and file of `docs`, and the texts of the search.

    With `repository`, its "owner/name" at GitHub, there are also copies of the notebooks in `hosted`, which begin with
    a cell that installs the course, and links to them and to the repository's files. Returns the paths of the pages.

    OSError where nothing can be written; ValueError names a file that is not a notebook, a missing picture, and
    an unknown or damaged view.
    """
    folder.mkdir(parents=True, exist_ok=True)
    docs = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/deeper/*.md"))]
    pages = [
        Page(path.relative_to(ROOT).as_posix(), _read_page(path))
        for path in (ROOT / "README.md", *notebooks_in_order(), *docs)
    ]
    exporter, paths, sections = _Exporter(config=CONFIG), [], []
    # Highlighted code is escaped already, and the notebooks are our own: cleaning would take a third of the time.
    exporter.register_filter("clean_html", lambda text: text)
    for page in pages:
        paths.append(folder / f"{page.stem}.html")
        if repository and page.is_lesson:
            (folder / "hosted").mkdir(exist_ok=True)
            nbformat.write(_make_hosted(page.notebook, repository), folder / f"hosted/{page.stem}.ipynb")
        try:
            text, found = _write_page(page, pages, exporter, repository)
        except ValueError as error:
            raise ValueError(f"the page of {page.stem} cannot be made: {error}") from error
        paths[-1].write_text(text, encoding="utf-8")
        sections += [[page.stem, page.title(), *section] for section in found]
    texts = json.dumps(sections, ensure_ascii=False, separators=(",", ":"))
    (folder / "search.js").write_text(f"window.tilesSections = {texts};\n", encoding="utf-8")
    return paths


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status 0; errors raise SystemExit with status 2."""
    parser = cli.make_plain_parser(
        "tilelab.course.site",
        "Write the README, the executed notebooks and docs as pages that need no network.",
    )
    parser.add_argument("folder", nargs="?", default=f"{ROOT}/build/site", help="default: build/site")
    parser.add_argument(
        "--repository",
        default="",
        metavar="OWNER/NAME",
        help="on GitHub, for links to files and hosted notebooks",
    )
    given = parser.parse_args(argv)
    folder = given.folder
    if not folder:
        parser.error("folder is empty; leave it out for build/site.")
    try:
        pages = write_pages(pathlib.Path(folder), given.repository)
    except OSError as error:
        parser.error(f"{folder} cannot be written ({error.strerror}).")
    except ValueError as error:
        parser.error(str(error))
    mib = sum(page.stat().st_size for page in pages) / 2**20
    print(f"{len(pages)} pages, {mib:.0f} MiB: open {pages[0]}")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
