"""The process that measures for a sweep: `python -m tilelab.sweeps.gpu_worker`, asked by tilelab.sweeps.sweep."""

from __future__ import annotations

import functools
import gc
import pickle
import socket

from tilelab.runtime import device, worker_pool


def _answer(request: dict) -> dict:
    """Call a method of a Space. `lost` says that the CUDA context is lost, and this process with it."""
    where = {"device": device.current().name, "gpu": device.current_uuid(), "host": socket.gethostname()}
    try:
        space, arguments = pickle.loads(request["work"])
        if _source(space) != request["source"]:
            raise RuntimeError(
                "the code has changed since the notebook imported it: reload it, or restart the kernel"
            )
        return {"value": getattr(space, request["method"])(*arguments), "where": where}
    except Exception as error:
        reason = f"{type(error).__name__}: {device.first_line(error)}"[:300]
    return {"reason": reason, "lost": not _free_memory(), "where": where}


@functools.cache
def _source(space) -> str:
    return space.source()  # of the modules that this process has imported; an edit starts another process


def _free_memory() -> bool:
    """Give back what a failed configuration still holds; return False where the GPU does not answer any more."""
    gc.collect()
    if device.current().capability is None:
        return True
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:  # after an illegal memory access every call fails
        return False
    return True


if __name__ == "__main__":
    worker_pool.serve(_answer)
