"""The files that `make lab` serves: a notebook that is only opened stays as it is in the repository.

JupyterLab writes the language and the name of the kernel into a notebook when its kernel starts, and then marks the
notebook as changed. They depend on the machine, so that the repository's notebooks leave them out. This contents
manager adds them for JupyterLab, and takes them away when a notebook is saved.
"""

from __future__ import annotations

import copy
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

from tilelab.course import notebook


def describe_kernel() -> dict[str, dict]:
    """Return the metadata that JupyterLab gives a notebook of the kernel python3."""
    from ipykernel.ipkernel import IPythonKernel

    spec = KernelSpecManager().get_kernel_spec("python3")
    kernelspec = {"name": "python3", "display_name": spec.display_name, "language": spec.language}
    return {"kernelspec": kernelspec, "language_info": dict(IPythonKernel.language_info)}


class NotebookContents(AsyncLargeFileManager):
    """The contents manager of `make lab`."""

    async def get(self, path: str, *args: Any, **options: Any) -> dict:
        model = await super().get(path, *args, **options)
        if model["type"] == "notebook" and model["content"]:
            metadata = model["content"]["metadata"]
            if metadata.items() >= notebook.METADATA.items():
                metadata |= describe_kernel()
        return model

    async def save(self, model: dict, path: str = "") -> dict:
        if model.get("type") == "notebook" and model.get("content"):
            metadata = model["content"]["metadata"]
            if metadata.get("kernelspec", {}).get("name") == "python3":
                metadata |= copy.deepcopy(notebook.METADATA)
        return await super().save(model, path)
