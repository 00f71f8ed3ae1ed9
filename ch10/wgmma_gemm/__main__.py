"""Run `python -m ch10.wgmma_gemm`."""

from ch10.wgmma_gemm.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
