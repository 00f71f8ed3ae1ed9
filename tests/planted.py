"""Plant a mistake in a kernel of a notebook's cell."""

from tilelab.cells import cuda_magic


def answer(kernels, name, change=("", "")):
    """Return the kernels of the cell that holds `name`, by name, with one text of the cell replaced by another."""
    source = kernels[name].source
    assert change[0] in source
    return cuda_magic.find_kernels(source.replace(*change), kernels[name].options)
