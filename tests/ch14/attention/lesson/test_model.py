import pytest

from ch14.attention.configs import HEAD_DIMS, estimate_clocks
from ch14.attention.lesson import model


def test_the_model_of_who_is_busy():
    """64 blocks: in lockstep the units take turns, the sum of all costs; free of each other the slower one is busy."""
    for d in HEAD_DIMS:
        cost = estimate_clocks(d)
        softmax = cost["exponential"] + cost["float32"]
        shares = {step: model.schedule(step, d, 64)[1] for step in ("lockstep", "roles", "overlap")}
        assert shares["lockstep"] == pytest.approx(cost["products"] / (cost["products"] + softmax), abs=0.02)
        assert shares["roles"] == pytest.approx(min(1, cost["products"] / softmax), abs=0.02)
        assert shares["overlap"] >= shares["roles"]
        for step in shares:  # a unit does one thing at a time
            spans = sorted((unit, begin, end) for unit, _, begin, end in model.schedule(step, d)[0])
            assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(spans, spans[1:]))
