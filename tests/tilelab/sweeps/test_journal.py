"""The journal of a sweep: torn and foreign lines, links, files that are none."""

import json
import os

import filelock
import pytest

from tilelab.sweeps.journal import Journal


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal.jsonl")


def test_the_last_row_of_a_key_counts_also_after_a_torn_line(journal):
    assert journal.rows() == {}
    journal.append({"key": "a", "n": 1})
    journal.append({"key": "a", "n": 2, "nested": {"x": [1.5, None, "é"]}})
    with open(journal.path, "ab") as file:
        file.write(b'{"key": "torn", "status": "o')
    journal.append({"key": "b", "reason": "\udc80"})
    assert journal.rows() == {
        "a": {"key": "a", "n": 2, "nested": {"x": [1.5, None, "é"]}},
        "b": {"key": "b", "reason": "\udc80"},
    }
    assert json.loads(journal.path.read_bytes().splitlines()[0])["n"] == 1, "a line is JSON"


def test_rows_are_forgotten_with_their_comparisons(journal):
    journal.forget(["a"])
    for row in ({"key": "a"}, {"key": "b", "reason": "\udc80"}, {"key": "final", "of": ["a", "b"]}):
        journal.append(row)
    journal.forget(["a"])
    assert journal.rows() == {"b": {"key": "b", "reason": "\udc80"}}


def test_lines_that_the_journal_did_not_write_are_passed_over(journal):
    journal.append({"key": "a", "status": "ok", "ms": 1.25})
    (kept,) = journal.path.read_bytes().splitlines()
    foreign = [b'{"key": "b", "status": "ok", "ms": 1.0}', kept.replace(b"1.25", b"9" * 400), b"[1]"]
    foreign += [b"\xff\xfe", b"", kept.replace(b'"ms": 1.25', b'"ms": "1"'), b'{"key": ["a"], "crc32": 1}']
    foreign += [b"[" * 200_000]
    journal.path.write_bytes(b"\n".join([*foreign[:4], kept, *foreign[4:]]))
    assert journal.rows() == {"a": {"key": "a", "status": "ok", "ms": 1.25}}


def test_no_row_is_lost_while_another_name_of_the_file_starts_over(journal, tmp_path):
    """A symbolic link and its target take the same lock."""
    journal.append({"key": "first"})
    (tmp_path / "link").symlink_to(journal.path)
    linked = Journal(tmp_path / "link")
    with journal._lock(), pytest.raises(filelock.Timeout):
        linked._lock().acquire(timeout=0)
    linked.append({"key": "second"})
    linked.forget(["first"])
    assert set(journal.rows()) == {"second"} and (tmp_path / "link").is_symlink()


def test_a_journal_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in ("/dev/zero", "/dev/full", tmp_path, tmp_path / "fifo"):
        with pytest.raises(ValueError, match="a journal is a regular file"):
            Journal(path)
    for name in ("x" * 300, "x" * 252, "loop"):  # the second is too long for its lock only
        with pytest.raises(OSError, match="too long|Too many levels"):
            Journal(tmp_path / name)
