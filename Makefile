# The first python of these that the course runs on; PYTHON=... chooses another.
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$python && break; done)
READY := .venv/.ready
# A machine without an NVIDIA driver has no use for the gigabytes of CUDA libraries that PyPI's torch brings.
CPU_TORCH := --index-url https://download.pytorch.org/whl/cpu --retries 0 --no-deps

NO_BROWSER := $(if $(DISPLAY)$(WAYLAND_DISPLAY),,--no-browser)

lab: $(READY)
	.venv/bin/jupyter lab --ip=127.0.0.1 $(NO_BROWSER) $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

# A kernel called python3 that was installed for this user may belong to another interpreter: ours comes first.
demo: $(READY)
	JUPYTER_PATH="$(CURDIR)/.venv/share/jupyter" .venv/bin/voila notebooks/demo/panel.ipynb --Voila.ip=127.0.0.1 --token \
		--strip_sources=True $(NO_BROWSER) $(DEMO_ARGS)

# Tests of kernels want a GPU for themselves; without one two of them run side by side.
SIDE_BY_SIDE := $(shell test -e /proc/driver/nvidia/version || command -v nvidia-smi >/dev/null || echo --numprocesses=2 --dist=worksteal)

test: $(READY)
	.venv/bin/python -m pytest $(SIDE_BY_SIDE)

record: $(READY)
	.venv/bin/python -m tilelab.record --tests

site: $(READY)
	.venv/bin/python -m tilelab.site

$(READY): requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "The course needs Python 3.11 or 3.12: install one, or name it with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@test -e /proc/driver/nvidia/version || command -v nvidia-smi >/dev/null || \
		.venv/bin/python -m pip install -q $(CPU_TORCH) $$(grep ^torch= requirements.txt) 2>/dev/null || \
		echo "The CPU build of torch is out of reach; taking the larger one from PyPI."
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache

.PHONY: lab demo test record site clean
