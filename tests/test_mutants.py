"""Every exercise's check rejects automatic mutants of its solution: a sample of them, and all in the tier `mutants`."""

import json
import os
import subprocess
import sys

import mutator
import pytest

from tilelab import ROOT, emulator

STEMS = [path.stem for path in sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))]

pytestmark = pytest.mark.skipif(not emulator.is_available(), reason="needs g++")


def judge(*options):
    """[stem, cell, mutant, what its check said] of mutants, and those of them that are wrong and were not rejected."""
    command = [sys.executable, mutator.__file__, "--json", *options]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert not done.returncode, done.stderr[-2000:]
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    return verdicts, [
        (stem, cell, what, said)
        for stem, cell, what, said in verdicts
        if not said.startswith("rejected") and not mutator.find_reason(stem, cell, what)
    ]


@pytest.mark.fault
def test_a_sample_of_the_mutants_is_rejected():
    # Cells of CUDA C++ and of Triton, and plain answers.
    sample = [stem for stem in STEMS if stem.endswith(("bulk_copy", "ch14_attention", "bug_hunt"))]
    verdicts, accepted = judge("--sample", "1", *sample)
    assert not accepted and {stem for stem, *_ in verdicts} == set(sample) and len(sample) == 3


@pytest.mark.mutants
@pytest.mark.parametrize("stem", STEMS)
def test_all_mutants_are_rejected(stem):
    verdicts, accepted = judge(stem)
    assert not accepted
    entries = [entry for entry in mutator.LISTED if entry["notebooks"] == [stem]]
    listed = [mutant for entry in entries for mutant in entry["mutants"]]
    stale = [mutant for mutant in listed if not any(mutant in what for _, _, what, _ in verdicts)]
    assert not stale


CUDA = """%%cuda k --then "check(k)"
extern "C" __global__ void k(float* x, int n) {
    __shared__ float tile[32];
    if (threadIdx.x < n && n > 1) tile[threadIdx.x] = x[threadIdx.x];  // a < b in a comment
    __syncthreads();
    mbarrier_wait(shared_address(&full), 0);
    x[threadIdx.x] = tile[31 - threadIdx.x];
    x[n] = 1;
}"""
PYTHON = """@triton.jit
def k(x, n):
    i = tl.arange(0, 32)
    i += 1
    v = tl.load(x + i, mask=(i < n) & (i > 2))
    tl.store(x + i, tl.where(v > 0, v, 0))
"""


IN_CUDA = ("(void)0;\n    mbarrier", ", 0 ^ 1)", "threadIdx.x <= n", "if (true)", "n || n > 1")
IN_PYTHON = ("mask=((i < n) & (i > 2)) == ((i < n) & (i > 2))", "mask=i < n)", "i <= n", "v >= 0")
IN_PYTHON += ("tl.store(x + i, v)", "i += 1\n    i = tl.arange")


@pytest.mark.parametrize("source, texts", [(CUDA, IN_CUDA), (PYTHON, IN_PYTHON)])
def test_every_kind_of_mutant_is_made_once(source, texts):
    found = [mutant.source for mutant in mutator.mutants(source)]
    assert len(set(found)) == len(found) and source not in found
    for text in texts:
        assert any(text in mutant for mutant in found), text
