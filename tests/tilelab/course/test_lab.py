"""A notebook that JupyterLab opens, gives its kernel's names and saves is the file that it was."""

import asyncio

import nbformat
import pytest

from tilelab.course import lab, notebook


@pytest.mark.parametrize("metadata", [notebook.METADATA, {"language_info": {"name": "julia"}}])
def test_opening_and_saving_change_nothing(tmp_path, metadata):
    path = tmp_path / "a.ipynb"
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(metadata=metadata)))
    before, contents = path.read_bytes(), lab.NotebookContents(root_dir=str(tmp_path))
    opened = asyncio.run(contents.get("a.ipynb"))
    ours = metadata is notebook.METADATA
    assert (opened["content"]["metadata"] | lab.describe_kernel() == opened["content"]["metadata"]) == ours
    asyncio.run(contents.save({"type": "notebook", "content": opened["content"]}, "a.ipynb"))
    assert path.read_bytes().strip() == before.strip()
    assert asyncio.run(contents.get("a.ipynb", content=False))["content"] is None
