"""The process that measures for a sweep: `python -m tilelab.gpu_worker`, asked by tilelab.sweep.timed."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import time

from tilelab import worker_pool, device, wire


def _answer(request: dict) -> dict:
    here = device.current()
    where = {"where": {"device": here.name, "gpu": device.current_uuid(), "host": socket.gethostname()}}
    try:
        space, arguments = wire.unpack(request["work"])
        if request["method"] == "warm":
            arguments = ()
        if _source(space) != request["source"]:
            raise RuntimeError("the code has changed since the notebook imported it: reload it, or restart the kernel")
        call = getattr(space, request["method"])
        begun = time.monotonic()
        try:
            return {"value": call(*arguments), **where}
        except Exception as error:
            if _fatal(error) or _out_of_memory(error) or time.monotonic() - begun > request["limit_s"] / 3:
                raise
            first = error
            # A damaged entry of the compiler's cache shows in many ways; in an empty cache it cannot.
            _forget_kernels()
            with tempfile.TemporaryDirectory() as folder:
                before = {"TRITON_CACHE_DIR": os.environ.pop("TRITON_CACHE_DIR", None)}
                os.environ["TRITON_CACHE_DIR"] = folder
                try:
                    return {"value": call(*arguments), **where}
                except Exception:
                    raise first from None
                finally:
                    del os.environ["TRITON_CACHE_DIR"]
                    os.environ.update({name: value for name, value in before.items() if value})
    except Exception as error:
        if _out_of_memory(error):
            _release()
        return {"reason": f"{type(error).__name__}: {device.first_line(error)}"[:300], "lost": _fatal(error), **where}


def _fatal(error: BaseException) -> bool:
    """Whether the CUDA context is lost, and with it everything that this process could still measure."""
    import torch

    while error is not None:
        if isinstance(error, torch.AcceleratorError):
            return True
        error = error.__cause__ or error.__context__
    if device.current().capability is None:
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


_sources: dict[str, str] = {}


def _source(space) -> str:
    """Of the code that this process has: a process that an edit makes old is replaced."""
    if repr(space) not in _sources:
        _sources[repr(space)] = space.source()
    return _sources[repr(space)]


def _forget_kernels() -> None:
    """What Triton keeps of kernels it has compiled or read in this process."""
    for thing in gc.get_objects():
        if type(thing).__name__ == "JITFunction":
            thing.device_caches.clear()


def _out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)  # of the CPU


def _release() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    worker_pool.serve(_answer)
