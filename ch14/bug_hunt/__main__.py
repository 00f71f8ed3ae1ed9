"""Run `python -m ch14.bug_hunt`."""

from ch14.bug_hunt.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
