"""Give each process that compiles caches of its own, and an answer also after an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from unittest import mock

import torch

from tilelab.runtime import device


@contextlib.contextmanager
def use_caches(folder: str | os.PathLike):
    """Keep Inductor's and Triton's caches in `folder`, and clear what they hold in memory."""
    from torch._inductor.utils import clear_caches

    os.makedirs(folder, exist_ok=True)
    clear_caches()
    folders = {
        "TORCHINDUCTOR_CACHE_DIR": os.fspath(folder),
        "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
    }
    with mock.patch.dict(os.environ, folders):
        yield


def answer_with(work: Callable[..., dict]) -> Callable[[dict], dict]:
    """Return the function of a request that a process serves: it calls `work(**request)`.

    An exception becomes {status, reason}. One that loses the CUDA context ends the process.
    """

    def answer(request: dict) -> dict:
        try:
            return work(**request)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            lines = [
                line for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")
            ]
            missing = isinstance(error, device.Unsupported) or "InvalidCxxCompiler" in str(error)
            reason = f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]
            return {"status": "unsupported" if missing else "failed", "reason": reason}

    return answer
