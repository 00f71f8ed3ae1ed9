"""Plant a mistake in a kernel of a notebook's cell."""

import pytest

from tilelab.cells import cuda_magic


def rarely(*values):
    """Return a case for the tier `trouble`: one that is always tried shows the same."""
    return pytest.param(*values, marks=pytest.mark.trouble)


def answer(kernels, name, *changes, **constants):
    """Return the kernels of the cell that holds `name`, by name, with texts of the cell replaced by others.

    `constants` replace the cell's -D constants of that kernel.
    """
    source = kernels[name].source
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    found = cuda_magic.find_kernels(source, kernels[name].options)
    return {key: kernel.define(**constants) for key, kernel in found.items()} if constants else found
