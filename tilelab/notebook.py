"""Run a notebook in a fresh kernel of this interpreter, and make of it what is committed."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import datetime
import os
import pathlib

from tilelab import results

ROOT = pathlib.Path(__file__).parents[1]
CELL_TIMEOUT_S = 900
SLOW_S = 5
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}


def child_env(**extra: str) -> dict[str, str]:
    """The environment of a kernel or a test run: it finds this repository, installed or not, and inline plots work."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    kept = {name: value for name, value in os.environ.items() if name not in ("MPLBACKEND", "TILES_RECORD")}
    if folder := kept.get("TILES_RESULTS"):
        kept["TILES_RESULTS"] = os.path.abspath(folder)  # a kernel has another working directory
    return {**kept, "PYTHONPATH": path, **extra}


@contextlib.asynccontextmanager
async def start_kernel(path: pathlib.Path, **extra: str):
    """An nbclient.NotebookClient of the notebook, whose kernel is a fresh process of this interpreter that waits in the
    notebook's folder and has imported what the first cell will. It is ended at the end, whatever happened."""
    import nbformat
    from ipykernel import kernelspec
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class ThisInterpreter(KernelSpecManager):
        """An installed kernel called python3 may belong to another interpreter; this one needs no installed kernel."""

        def get_kernel_spec(self, kernel_name):
            return self.kernel_spec_class(resource_dir="", **kernelspec.get_kernel_dict())

    class Manager(AsyncKernelManager):
        def _kernel_spec_manager_default(self):
            return ThisInterpreter()

    client = NotebookClient(nbformat.read(path, as_version=4), timeout=CELL_TIMEOUT_S, kernel_name="python3",
                            kernel_manager_class=Manager, resources={"metadata": {"path": str(path.parent)}},
                            store_widget_state=False, coalesce_streams=True)
    manager = client.create_kernel_manager()
    try:
        await client.async_start_new_kernel(env=child_env(**extra))
        await client.async_start_new_kernel_client()
        # What goes wrong here goes wrong in the cell too, and is reported there.
        await client.async_wait_for_reply(client.kc.execute(_imports(client.nb), silent=True, stop_on_error=False))
        yield client
    finally:
        if await manager.is_alive():
            await manager.shutdown_kernel(now=True)


def _imports(notebook) -> str:
    """The imports of a notebook's first cell of code; none of a cell that is not all Python."""
    first = next((cell.source for cell in notebook.cells if cell.cell_type == "code"), "")
    with contextlib.suppress(SyntaxError):
        return "\n".join(ast.unparse(line) for line in ast.parse(first).body
                         if isinstance(line, (ast.Import, ast.ImportFrom)))
    return ""


async def execute(client):
    """Run the notebook of a `start_kernel` from top to bottom and return it with its outputs.

    Raises nbclient's CellExecutionError, CellTimeoutError or DeadKernelError.
    """
    from nbclient.exceptions import DeadKernelError

    def refuse(*_):
        raise RuntimeError("Ctrl-C is not for this notebook alone")

    asyncio.get_running_loop().add_signal_handler = refuse  # nbclient's would end the kernel, and no more
    try:
        return await client.async_execute()
    except DeadKernelError:
        if asyncio.current_task().cancelling():  # by Ctrl-C, and not by a death
            raise asyncio.CancelledError from None
        raise


def tidy(notebook) -> None:
    """Drop what differs from run to run and what a saved notebook cannot show; number the cells 1 to n."""
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
            output.get("data", {}).pop(WIDGET, None)  # without its state a widget cannot be drawn; its text can


def slowest_cells(notebook) -> str:
    """Where the time of an executed notebook went: its three slowest cells, those of a few seconds left out."""
    spent, number = [], 0
    for cell in notebook.cells:
        number += bool(cell.cell_type == "code" and cell.source.strip())
        marks = cell.metadata.get("execution", {})
        begun, ended = (marks.get(name) for name in ("iopub.execute_input", "shell.execute_reply"))
        if begun and ended:
            begun, ended = (datetime.datetime.fromisoformat(mark.replace("Z", "+00:00")) for mark in (begun, ended))
            spent.append(((ended - begun).total_seconds(), number))
    return ", ".join(f"[{number}] {seconds:.0f} s" for seconds, number in sorted(spent, reverse=True)[:3]
                     if seconds >= SLOW_S)


async def record_notebook(path: pathlib.Path, client) -> str:
    """Execute a notebook in the kernel of a `start_kernel`, tidy it and write it back; returns its `slowest_cells` cells.

    Raises as `execute` does, and the file then stays as it was."""
    import nbformat

    notebook = await execute(client)
    slow = slowest_cells(notebook)
    tidy(notebook)
    results.write_atomically(path, nbformat.writes(notebook).rstrip() + "\n")
    return slow
