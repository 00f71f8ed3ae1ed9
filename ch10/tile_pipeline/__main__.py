"""Run `python -m ch10.tile_pipeline`."""

from ch10.tile_pipeline.lesson.command import COMMAND

if __name__ == "__main__":
    COMMAND.run()
