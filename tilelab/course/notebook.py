"""Run a notebook in a fresh kernel of this Python interpreter, and turn it into the form that is committed."""

from __future__ import annotations

import asyncio
import datetime
import os
import pathlib

from tilelab import ROOT
from tilelab.runtime import files

CELL_TIMEOUT_S = 900
SLOW_S = 5
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def child_env(**extra: str) -> dict[str, str]:
    """Return the environment of a kernel or a test run, in which this repository can be imported, installed or not."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # MPLBACKEND would turn off inline plots.
    kept = {name: value for name, value in os.environ.items() if name not in ("MPLBACKEND", "TILES_RECORD")}
    if folder := kept.get("TILES_RESULTS"):
        kept["TILES_RESULTS"] = os.path.abspath(folder)  # a kernel has another working directory
    return {**kept, "PYTHONPATH": path, **extra}


async def execute(notebook, folder: pathlib.Path, env: dict[str, str]):
    """Run a notebook from top to bottom in `folder`, in a fresh kernel with the environment `env`, and return it.

    Raises nbclient's CellExecutionError, CellTimeoutError or DeadKernelError.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError

    def refuse(*_):
        raise RuntimeError("nbclient must not handle Ctrl-C: it would only end the kernel")

    asyncio.get_running_loop().add_signal_handler = refuse
    # Without folders of kernels, "python3" is this interpreter; an installed kernel may belong to another one.
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    # The state of widgets is stored, although `tidy` removes it: nbclient fails without it if a widget shows outputs.
    options = {"timeout": CELL_TIMEOUT_S, "store_widget_state": True, "coalesce_streams": True}
    client = NotebookClient(notebook, manager, resources={"metadata": {"path": str(folder)}}, **options)
    try:
        return await client.async_execute(env=env)
    except DeadKernelError:
        if asyncio.current_task().cancelling():  # Ctrl-C ended the kernel
            raise asyncio.CancelledError from None
        raise
    finally:
        if await manager.is_alive():
            await manager.shutdown_kernel(now=True)


def tidy(notebook) -> None:
    """Remove what differs between runs or needs a running kernel, and number the cells from 1."""
    notebook.metadata = {**METADATA}
    count = 0
    for cell in notebook.cells:
        for volatile in ("execution", "collapsed", "scrolled"):
            cell.metadata.pop(volatile, None)
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        if cell.source.strip():
            cell.execution_count = count = count + 1
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            # Without its state only the text of a widget can be shown.
            output.get("data", {}).pop(WIDGET, None)


def slowest_cells(notebook) -> str:
    """Return the numbers and times of the three slowest cells of an executed notebook, above SLOW_S seconds."""
    times, number = [], 0
    for cell in notebook.cells:
        number += bool(cell.cell_type == "code" and cell.source.strip())
        execution = cell.metadata.get("execution", {})
        stamps = [execution.get(name) for name in ("iopub.execute_input", "shell.execute_reply")]
        if all(stamps):
            begin, end = (datetime.datetime.fromisoformat(stamp.replace("Z", "+00:00")) for stamp in stamps)
            times.append(((end - begin).total_seconds(), number))
    slowest = sorted((each for each in times if each[0] >= SLOW_S), reverse=True)[:3]
    return ", ".join(f"[{number}] {seconds:.0f} s" for seconds, number in slowest)


async def record_notebook(path: pathlib.Path, **env: str) -> str:
    """Run a notebook with the variables `env`, tidy it, write it back; return `slowest_cells`.

    Raises as `execute`; the file then stays as it was.
    """
    import nbformat

    notebook = await execute(nbformat.read(path, 4), path.parent, child_env(**env))
    slow = slowest_cells(notebook)
    tidy(notebook)
    files.write_atomically(path, nbformat.writes(notebook).rstrip() + "\n")
    return slow
