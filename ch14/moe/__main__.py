"""Run `python -m ch14.moe`."""

from ch14.moe.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
