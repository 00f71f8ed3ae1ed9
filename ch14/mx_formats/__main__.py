"""Run `python -m ch14.mx_formats`."""

from ch14.mx_formats.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
