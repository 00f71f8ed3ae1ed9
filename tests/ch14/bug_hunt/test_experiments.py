"""The recorded builds: what the installed Triton builds still, and how a difference is described."""

import pytest

from ch14.bug_hunt import environments, experiments


@pytest.mark.compile
def test_the_installed_triton_builds_as_recorded(monkeypatch):
    """All cells of its row of the matrix, from an empty cache, for one target of each family."""
    version = environments.installed_version()
    if version not in experiments.VERSIONS:
        pytest.fail(f"Triton {version} is not recorded: TILES_RECORD=1 python -m ch14.bug_hunt --matrix")
    cells = [cell for cell in experiments.EXPERIMENTS["matrix"]() if cell[1] in ("sm_90a", "sm_100a", "sm_120a")]
    monkeypatch.setitem(experiments.EXPERIMENTS, "matrix", lambda: cells)
    built = experiments.build_now("matrix", version)
    assert len(built) == 63 and experiments.list_differences("matrix", built) == []


def test_a_difference_is_a_sentence():
    row = next(row for row in experiments.load_record("matrix").rows if row["outcome"] == "builds")
    said, = experiments.list_differences("matrix", [row | {"outcome": "fails"}])
    assert said.endswith("outcome was 'builds', is 'fails'") and said.startswith("loop, 3.5.0, sm_90a, plain")
    assert experiments.list_differences("matrix", [row | {"triton": "1.0.0"}])[0].endswith(": not recorded")
