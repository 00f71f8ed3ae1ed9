"""A plugin of pytest: keep the outputs of a notebook's cells in the file TILES_OUTPUTS, a line of JSON for each."""

import json
import os


def pytest_runtest_teardown(item):
    with open(os.environ["TILES_OUTPUTS"], "a") as file:
        file.write(json.dumps(item.test_outputs) + "\n")
