"""Run `python -m ch07.bulk_copy`."""

from ch07.bulk_copy.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
