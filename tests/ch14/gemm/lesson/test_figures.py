"""What the lesson prints about its records."""

from types import SimpleNamespace

from ch14.gemm.lesson import figures


def test_the_means_of_a_set_are_by_tokens():
    rows = [
        {"shape": [tokens, 1, 1], "ratio": ratio} for tokens, ratio in ((8, 0.5), (200, 0.8), (4096, 2.0))
    ]
    head, said = figures.describe_means({"some": rows}).splitlines()
    assert head.split()[-2:] == ["lowest", "shape"]
    assert said.split() == "some, 3 shapes 0.50 0.80 2.00 0.93 0.50".split()
    picture = figures.draw_held_out({"some": rows * 2, "others": rows * 2}, "somewhere")
    assert "some: the lowest mean, 0.50, is at 8 tokens" in picture.description
    assert picture.get_suptitle() == "Untuned shapes: some first falls behind at 8 tokens, most at 8"
    rows[2]["ratio"] = 0.99  # as fast, within what repeats
    picture = figures.draw_held_out({"some": rows[2:] * 2}, "somewhere")
    assert picture.get_suptitle() == "Untuned shapes: some keeps up at all numbers of tokens"


def test_the_losses_are_relative_to_the_winner():
    speeds = {("winner", ""): 0.5, ("winner, one per SM, 6 stages", ""): 0.4, ("last", "a loop"): 0.2}
    speeds["alone", "3 stages"] = 0.45
    rows = [{"kind": kind, "ingredient": name, "ratio": ratio} for (kind, name), ratio in speeds.items()]
    switched = [{"shape": [4096] * 3, "without_tma": 0.5, "config": "a tile · 2 per SM"}]
    said = figures.describe_losses({4096: SimpleNamespace(rows=rows)}, switched)
    assert said.split() == (
        "4096³ 3 stages alone, × torch.mm 0.45 winner, × torch.mm 0.50 "
        "without a loop 0.40 without TMA 0.50 one per SM, 6 stages 0.80".split()
    )
    unmeasured = [{key: row[key] for key in ("kind", "ingredient")} for row in rows]
    assert figures.describe_losses({4096: SimpleNamespace(rows=unmeasured)}, []) == ""


def test_both_parts_of_the_ablation_have_one_scale():
    speeds = {("plain", ""): 0.5, ("winner", ""): 1.0, ("alone", "stages"): 1.4, ("last", "stages"): 0.3}
    rows = [{"kind": kind, "ingredient": name, "ratio": ratio} for (kind, name), ratio in speeds.items()]
    left, right = figures.draw_ablation({4096: SimpleNamespace(rows=rows, label=str)}).axes
    assert left.get_xlim() == right.get_xlim() and left.get_xlim()[0] < 0.3 and left.get_xlim()[1] > 2.8
