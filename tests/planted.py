"""Plant a mistake in a kernel of a notebook's cell."""

from tilelab.cells import cuda_magic


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
