"""Run `python -m ch14.attention`."""

from ch14.attention.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
