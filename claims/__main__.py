"""`python -m claims` prints every claim with its verdict; `python -m claims --write` writes the README's table and the
figures of its measured answers anew, and runs the notebook 01_claims. That needs no GPU.

Exit status: 0 fine, 2 bad usage, a README without the two marks or an answer's words, or records without its figures.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from claims import answers, trial
from claims.judge import counted
from tilelab import notebook, results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m claims", description="The field notes' claims and their verdicts.")
    parser.add_argument("--write", action="store_true", help="into README.md and notebooks/01_claims.ipynb")
    if parser.parse_args(argv).write:
        try:
            text = answers.rewritten(trial.rewritten(trial.README.read_text(encoding="utf-8")))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        results.write_atomically(trial.README, text)
        asyncio.run(notebook.record_notebook(trial.NOTEBOOK, TILES_RECORD="1"))
        return 0
    for note in trial.NOTES:
        print(f"{note.title}: {counted(trial.judged(note))}")
        for each in trial.judged(note):
            print(f"  {each.claim.text}\n    " + " | ".join(filter(None, (each.finding.told(), each.finding.figure))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
