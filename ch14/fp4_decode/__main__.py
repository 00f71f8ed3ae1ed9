"""Run `python -m ch14.fp4_decode`."""

from ch14.fp4_decode.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
