"""Run `python -m ch14.blockscaled`."""

from ch14.blockscaled.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
