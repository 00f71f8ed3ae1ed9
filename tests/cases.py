"""Run a test once for each of some values."""

import pytest


def cases(names, *values, **options):
    """Return a decorator that runs a test with each of the values as its argument, or arguments, of these names."""
    return pytest.mark.parametrize(names, values, **options)
