"""Print every claim with its verdict or, with --write, write them into the README and run the notebook 01_claims.

--write also writes the figures of the README's measured answers. It needs no GPU. The exit status is 0, or 2 for bad
usage, for a README without the two marks or the words of an answer, and for records without a figure.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from claims import answers, trial
from claims.judge import count_verdicts
from tilelab import notebook, results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m claims", description="The field notes' claims and their verdicts.")
    parser.add_argument("--write", action="store_true", help="into README.md and notebooks/01_claims.ipynb")
    if parser.parse_args(argv).write:
        try:
            text = answers.rewrite_figures(trial.rewrite_table(trial.README.read_text(encoding="utf-8")))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        results.write_atomically(trial.README, text)
        asyncio.run(notebook.record_notebook(trial.NOTEBOOK, TILES_RECORD="1"))
        return 0
    for note in trial.NOTES:
        print(f"{note.title}: {count_verdicts(note.judgements)}")
        for judgement in note.judgements:
            finding = judgement.finding
            print(f"  {judgement.claim.text}\n    {' | '.join(filter(None, (finding.describe(), finding.figure)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
