PYTHON ?= python3
READY := .venv/.ready

test: $(READY)
	.venv/bin/python -m pytest

lab: $(READY)
	.venv/bin/jupyter lab --ip=127.0.0.1 $(if $(DISPLAY)$(WAYLAND_DISPLAY),,--no-browser) $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache

.PHONY: test lab clean
