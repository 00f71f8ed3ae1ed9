"""Write the README and the executed notebooks as pages that need no network: `python -m tilelab.site [folder]`."""

from __future__ import annotations

import pathlib
import re

import nbformat
from nbconvert import HTMLExporter

from tilelab import cli, device
from tilelab.worker_pool import ROOT

# Scripts that nbconvert's template would fetch and that the notebooks do not need.
SCRIPT_URLS = ("require_js_url", "jquery_url", "mathjax_url", "mermaid_js_url", "widget_renderer_url",
               "jupyter_widgets_base_url")
NOTEBOOK = re.compile(r'href="(?:[\w./]*/)?(\w+)\.ipynb(#[^"]*)?"')
FILE = re.compile(r'<a\b[^>]*\bhref="(?!\w+:|#|\w+\.html)[^"]*"[^>]*>(.*?)</a>', re.S)


def notebooks_in_order() -> list[pathlib.Path]:
    """Return the notebooks in the README's order, then those that it does not name."""
    readme, folder = (ROOT / "README.md").read_text(), ROOT / "notebooks"
    named = [folder / name for name in dict.fromkeys(re.findall(r"\(notebooks/(\w+\.ipynb)\)", readme))]
    return named + sorted(path for path in folder.glob("*.ipynb") if path not in named)


def _rewrite_links(body: str) -> str:
    """Point links to notebooks at their pages, and turn links to other files of the repository into plain text."""
    return FILE.sub(r"\1", NOTEBOOK.sub(r'href="\1.html\2"', body))


def _read_notebook(path: pathlib.Path):
    try:
        return nbformat.read(path, 4)
    except Exception as error:  # nbformat raises errors of several libraries
        raise ValueError(f"{path} is not a notebook: {device.first_line(error)}.") from error


def _page(exporter: HTMLExporter, notebook, title: str, top: str) -> str:
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(top))
    body, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": title, "path": str(ROOT)}})
    # Even without the addresses the template loads scripts, which the pages do not need.
    body = re.sub(r"<script\b[^>]*>.*?</script>", "", body, flags=re.S)
    return _rewrite_links(re.sub(r'<link\b[^>]*href="https?:[^>]*>', "", body))


def write_pages(folder: pathlib.Path) -> list[pathlib.Path]:
    """Write `index.html`, from the README, and a page for each notebook into `folder`; return their paths.

    OSError where nothing can be written; ValueError names a file that is not a notebook.
    """
    folder.mkdir(parents=True, exist_ok=True)
    exporter = HTMLExporter(embed_images=True,
                            **dict.fromkeys(set(SCRIPT_URLS) & set(HTMLExporter.class_trait_names()), ""))
    readme = (ROOT / "README.md").read_text()
    (folder / "index.html").write_text(_page(exporter, nbformat.v4.new_notebook(), "Tiles in Flight", readme))
    pages, notebooks = [folder / "index.html"], notebooks_in_order()
    for before, path, after in zip([None, *notebooks], notebooks, [*notebooks[1:], None]):
        links = [f"{word}: [{other.stem}]({other.name})"
                 for word, other in (("before", before), ("next", after)) if other]
        top = " · ".join(["[Tiles in Flight](index.ipynb)", *links])
        pages.append(folder / f"{path.stem}.html")
        pages[-1].write_text(_page(exporter, _read_notebook(path), path.stem, top))
    return pages


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status 0; errors raise SystemExit with status 2."""
    parser = cli.make_plain_parser("tilelab.site", "Write the README and the executed notebooks as pages that need no "
                                   "network.")
    parser.add_argument("folder", nargs="?", default=f"{ROOT}/build/site", help="default: build/site")
    folder = parser.parse_args(argv).folder
    if not folder:
        parser.error("folder is empty; leave it out for build/site.")
    try:
        pages = write_pages(pathlib.Path(folder))
    except OSError as error:
        parser.error(f"{folder} cannot be written ({error.strerror}).")
    except ValueError as error:
        parser.error(str(error))
    print(f"{len(pages)} pages, {sum(page.stat().st_size for page in pages) / 2**20:.0f} MiB: open {pages[0]}")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
