"""Run `python -m ch14.gemm`."""

from ch14.gemm.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
