"""Run `python -m ch14.descriptors`."""

from ch14.descriptors.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
