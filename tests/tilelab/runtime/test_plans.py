"""A plan is made once per kind of arguments, and never for arguments that it does not fit."""

import gc
import weakref

import pytest
import torch
from cases import cases

from tilelab.runtime import plans


def make_planner(made):
    def make(a, b, out, scale):
        if a.shape != b.shape:
            raise ValueError("the shapes differ.")
        made.append((a.shape, scale))
        return plans.Plan(
            lambda a, b, out: torch.add(a, b, alpha=scale, out=out), a.shape, a.dtype, a.device, "only"
        )

    return plans.Planner(make, ("a", "b"))


def test_the_second_call_of_a_kind_is_not_planned():
    made = []
    planner = make_planner(made)
    for _ in range(3):
        a, b = torch.randn(4, 8), torch.randn(4, 8)
        assert torch.equal(planner.run((a, b), None, 2), a + 2 * b)
        out = torch.empty(4, 8)
        assert planner.run((a, b), out, 2) is out and torch.equal(out, a + 2 * b)
    assert len(made) == 2  # with and without `out`


@cases(
    "change",
    lambda a: torch.randn(5, 8),
    lambda a: a.double(),
    lambda a: torch.randn(8, 4).T,
    lambda a: torch.nn.Parameter(a),
    lambda a: torch.randn(4, 9)[:, 1:],
    lambda a: torch.randn(33)[1:].view(4, 8),
    lambda a: torch._neg_view(a),
)
def test_another_kind_is_planned(change):
    made = []
    planner = make_planner(made)
    a = torch.randn(4, 8)
    planner.run((a, a), None, 1)
    changed = change(a)
    with torch.no_grad():
        assert torch.equal(planner.run((changed, changed), None, 1), 2 * changed)
    assert len(made) == 2


def test_options_are_part_of_the_kind():
    made = []
    planner = make_planner(made)
    a = torch.randn(4, 8)
    for scale in (1, 2, 1):
        planner.run((a, a), None, scale)
    assert made == [(a.shape, 1), (a.shape, 2)]


def test_bad_arguments_are_refused_each_time():
    planner = make_planner([])
    a = torch.randn(4, 8)
    for _ in range(2):
        with pytest.raises(ValueError, match="the shapes differ"):
            planner.run((a, a[:2]), None, 1)
        with pytest.raises(AttributeError):
            planner.run(("no tensor", a), None, 1)
    assert not planner.plans
    planner.run((a, a), torch.empty(4, 8), 1)
    both = torch.randn(8, 8)
    with pytest.raises(ValueError, match="out lies in the memory of b"):  # a plan for such memory exists
        planner.run((a, both[2:6]), both[4:], 1)


def test_an_option_that_cannot_be_hashed_is_planned_each_time():
    planner = plans.Planner(
        lambda a, out, option: plans.Plan(lambda a, out: out.copy_(a), a.shape, a.dtype, a.device, option),
        "a",
    )
    assert torch.equal(planner.run((torch.ones(3),), None, ["list"]), torch.ones(3)) and not planner.plans


def test_plans_keep_no_tensor_and_are_few(monkeypatch):
    monkeypatch.setattr(plans, "MOST_PLANS", 3)
    planner = make_planner([])
    for rows in range(1, 9):
        a = torch.randn(rows, 8)
        planner.run((a, a), None, 1)
        assert len(planner.plans) <= 3
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None


def test_a_prepared_launch_keeps_its_tensors_and_is_planned_anew():
    made = []
    planner = make_planner(made)
    launches = [planner.prepare((torch.ones(4, 8), torch.ones(4, 8)), None, 3) for _ in range(2)]
    assert torch.equal(launches[0](), torch.full((4, 8), 4.0)) and launches[0].config == "only"
    assert len(made) == 2 and not planner.plans


def test_a_fallback_warns_at_each_call():
    plan = plans.Plan(
        lambda a, out: out.copy_(a), (3,), torch.float32, torch.device("cpu"), "slow", fallback="slow!"
    )
    planner = plans.Planner(lambda *_: plan, "a")
    for _ in range(2):
        with pytest.warns(UserWarning, match="slow!"):
            planner.run((torch.ones(3),), None)
