"""Run `python -m ch14.fp8_gemm`."""

from ch14.fp8_gemm.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
