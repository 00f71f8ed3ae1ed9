"""Run `python -m tilelab.emulator`."""

from tilelab import cli
from tilelab.cells import check_kernel

if __name__ == "__main__":
    cli.run_main(check_kernel.main)
