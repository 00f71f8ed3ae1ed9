"""Find folders for compiled kernels that can be written, so that kernels run although a disk is read-only or full.

Triton and Inductor raise an error where they cannot write their cache. Each process of the user finds the replacement
in the folder of temporary files, so it serves as a cache all the same.
"""

from __future__ import annotations

import functools
import os
import pathlib
import tempfile
import warnings

from tilelab.runtime import device


def triton_folder() -> pathlib.Path:
    """Return the folder of Triton's cache."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return pathlib.Path(os.environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache")


def why_not_writable(folder: pathlib.Path) -> str:
    """Return why no file can be written below `folder`, which need not exist yet; "" where one can."""
    try:  # write a real file: permission bits mean nothing to root or on a read-only mount
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(4096))
            file.flush()  # a full disk still lets a file be created
        return ""
    except OSError as error:
        return error.strerror or type(error).__name__


@functools.cache  # one look and one warning for each folder
def replace_if_unwritable(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return `folder`, or the temporary folder called `name` of this user with a warning that says why."""
    if not (reason := why_not_writable(folder)):
        return folder
    try:
        other = device.user_lock_path(name).with_suffix("")
    except OSError:
        return folder  # there is no better one
    warnings.warn(
        f"{folder} cannot be written ({reason}): compiled kernels are kept in {other} instead.", stacklevel=3
    )
    return other


def replace_unwritable_caches() -> None:
    """Let Triton and Inductor use other folders, by their environment variables, where theirs cannot be written."""
    for variable, folder in (
        ("TRITON_CACHE_DIR", triton_folder()),
        ("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR")),
    ):
        if folder:  # without the variable, Inductor's is in the folder of temporary files already
            found = replace_if_unwritable(pathlib.Path(folder), variable.lower())
            if found != pathlib.Path(folder):
                os.environ[variable] = os.fspath(found)
