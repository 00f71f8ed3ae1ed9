"""Run `python -m ch07.resample`."""

from ch07.resample.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
