"""What the course refuses, it refuses in one sentence."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(message, error=ValueError):
    """Expect an error that matches the message and is one sentence."""
    with pytest.raises(error, match=message) as caught:
        yield caught
    assert "\n" not in str(caught.value) and str(caught.value).endswith("."), str(caught.value)
