"""Print every claim with its verdict or, with --write, write CLAIMS.md and parts of two pages, and run claims.

The parts are the README's telling verdicts, the figures of its findings and its picture, and two tables of
docs/operators.md.
--write needs no GPU. The exit status is 0, or 2 for bad usage, for a page that cannot be written or lacks its two marks
or the words of a finding, for a record that is damaged or lacks a figure, and for a notebook that fails.
"""

from __future__ import annotations

import asyncio

from claims import answers, trial
from claims.judge import count_verdicts
from tilelab import cli
from tilelab.course import notebook
from tilelab.runtime import device, files


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status 0; errors raise SystemExit with status 2."""
    parser = cli.make_plain_parser("claims", "The field notes' claims and their verdicts.")
    parser.add_argument(
        "--write", action="store_true", help="write CLAIMS.md, claims.ipynb and parts of two pages"
    )
    options = parser.parse_args(argv)
    try:
        if options.write:
            text = answers.rewrite_figures(trial.rewrite_table(trial.README.read_text(encoding="utf-8")))
            page = answers.rewrite_tables(answers.OPERATORS.read_text(encoding="utf-8"))
            files.write_atomically(trial.README, text)
            files.write_atomically(answers.OPERATORS, page)
            files.write_atomically(trial.LEDGER, trial.make_ledger())
            trial.draw_picture()
            asyncio.run(notebook.record_notebook(trial.NOTEBOOK, TILES_RECORD="1"))
        else:
            _print_verdicts()
    except BrokenPipeError:
        raise  # to `cli.run_main`
    except Exception as error:  # also the errors of the notebook's cells
        parser.error(f"{device.first_line(error).rstrip('.')}.")
    return 0


def _print_verdicts() -> None:
    for note in trial.NOTES:
        print(f"{note.title}: {count_verdicts(note.judgements)}")
        for judgement in note.judgements:
            finding = judgement.finding
            print(
                f"  {judgement.claim.text}\n    {' | '.join(filter(None, (finding.describe(), finding.figure)))}"
            )


if __name__ == "__main__":
    cli.run_main(main)
