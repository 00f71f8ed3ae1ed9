"""Run `python -m ch14.compiled`."""

from ch14.compiled.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
