"""What the lesson prints about its records."""

from types import SimpleNamespace

from ch14.gemm.lesson import figures


def test_the_means_of_a_set_are_by_tokens():
    rows = [
        {"shape": [tokens, 1, 1], "ratio": ratio} for tokens, ratio in ((8, 0.5), (200, 0.8), (4096, 2.0))
    ]
    said = figures.describe_means({"some": rows})
    assert "3 shapes, × torch.mm: 0.500 for 1 to 64 tokens, 0.800 for 130 to 400, 2.000" in said
    assert said.endswith("lowest 0.500")


def test_the_losses_are_relative_to_the_winner():
    speeds = {("winner", ""): 0.5, ("winner, one per SM, 6 stages", ""): 0.4, ("last", "a loop"): 0.2}
    speeds["alone", "3 stages"] = 0.45
    rows = [{"kind": kind, "ingredient": name, "ratio": ratio} for (kind, name), ratio in speeds.items()]
    said = figures.describe_losses({4096: SimpleNamespace(rows=rows)})
    assert said.split() == (
        "4096³ 3 stages alone, × torch.mm 0.45 winner, × torch.mm 0.50 "
        "without a loop 0.40 one per SM, 6 stages 0.80".split()
    )
    unmeasured = [{key: row[key] for key in ("kind", "ingredient")} for row in rows]
    assert figures.describe_losses({4096: SimpleNamespace(rows=unmeasured)}) == ""
