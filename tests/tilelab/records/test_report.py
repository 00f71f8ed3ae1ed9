"""The text of a report: its sections in order, tables that Markdown can read, and the script."""

from tilelab.records import report


def test_a_report_is_this():
    text = report.write(
        "It breaks",
        "This is a bug.",
        [("GPU", "H200 | 9.0")],
        {"Expected": ["Nothing."], "Observed": ["", report.fence("a\n\n")]},
        report.Script("r.py", "python", "print(1)\n", "python r.py", ", tested"),
        "the tracker",
    )
    assert text == (
        "# It breaks\n\nThis is a bug.\n\n"
        "## Environment\n\n| what | which |\n| --- | --- |\n| GPU | H200 \\| 9.0 |\n\n"
        "## Expected\n\nNothing.\n\n## Observed\n\n```\na\n```\n\n"
        "## Reproducer\n\n`r.py`, tested:\n\n```python\nprint(1)\n```\n\n```\npython r.py\n```\n\n"
        "Before filing: search the tracker.\n"
    )
