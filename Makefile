# The first python of these that the course runs on; PYTHON=... chooses another.
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$python && break; done)
READY := .venv/.ready
# Without an NVIDIA driver the CPU build of torch is enough: 2.6 GB on disk instead of 5.3 GB. It comes from the folder
# of wheels that is configured for pip, if there is one, or from PyTorch's own index.
HAS_GPU := $(shell test -e /proc/driver/nvidia/version && echo yes || command -v nvidia-smi)
CPU_TORCH := $(if $(PIP_FIND_LINKS),--offline --find-links $(PIP_FIND_LINKS),--index-url https://download.pytorch.org/whl/cpu)

# A .venv that was moved with its clone, or whose Python is gone or is not the one that was asked for, is made anew.
ASKED := $(if $(filter command environment,$(firstword $(origin PYTHON))),$(shell $(PYTHON) -c 'import sys; print(sys.version_info[:2])'))
HEALTHY := $(shell .venv/bin/python -c 'import sys; v = sys.version_info[:2]; \
	sys.exit(not (3, 11) <= v < (3, 13) or "$(ASKED)" not in ("", str(v)))' 2>/dev/null && cat $(READY) 2>/dev/null)
ifneq ($(HEALTHY),$(CURDIR))
$(shell rm -f $(READY))
endif

NO_BROWSER := $(if $(DISPLAY)$(WAYLAND_DISPLAY),,--no-browser)

# Defaults of this environment: JupyterLab neither asks whether it may fetch news nor looks for newer versions.
LAB_DEFAULTS := {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}

lab: $(READY)
	@mkdir -p .venv/share/jupyter/lab/settings
	@echo '$(LAB_DEFAULTS)' > .venv/share/jupyter/lab/settings/overrides.json
	.venv/bin/jupyter lab --ip=127.0.0.1 --ServerApp.contents_manager_class=tilelab.course.lab.NotebookContents \
		--LabApp.default_url=/lab/tree/notebooks/00_start.ipynb $(NO_BROWSER) \
		$(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

# A kernel called python3 that was installed for this user may belong to another interpreter: ours comes first.
demo: $(READY)
	JUPYTER_PATH="$(CURDIR)/.venv/share/jupyter" .venv/bin/python -m tilelab.course.demo notebooks/demo/panel.ipynb \
		$(NO_BROWSER) $(DEMO_ARGS)

# TIER=unit runs the quick tests only; the others are compile, fault, browser, notebook, gpu, timing, trouble and mutants.
test: $(READY)
	.venv/bin/python -m tilelab.course.suite $(TIER)

# Style and types: ruff, clang-format, and mypy over the faces that a model imports.
lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' | xargs .venv/bin/clang-format --dry-run -Werror
	.venv/bin/mypy

record: $(READY)
	.venv/bin/python -m tilelab.course.record --all $(RECORD_ARGS)

# Measure the headlines on this GPU and compare them with the committed records of the same GPU and version of torch.
compare: $(READY)
	@committed=$$(.venv/bin/python -m tilelab.records.compare --folder) || exit 2; \
	if ls "$$committed"/ch*.json >/dev/null 2>&1; then \
		.venv/bin/python -m tilelab.course.record --experiments --to build/headlines && \
		.venv/bin/python -m tilelab.records.compare "$$committed" build/headlines --headlines; \
	else echo "Nothing is compared: $$committed holds no headlines of this GPU and this version of torch."; fi

# The benchmarks of the field notes: tiles of a GEMM, rows that are interpolated, and a block-scaled GEMM. Without a GPU
# the first two show their records, and the third is compiled and planned.
bench: $(READY)
	.venv/bin/python -m ch14.gemm --claim
	.venv/bin/python -m ch07.resample --mode performance --kernel all
	.venv/bin/python -m ch14.blockscaled --mnkl 8192,8192,1024,1 --mma_tiler_mn 256,128 --cluster_shape_mn 2,1 \
		--ab_dtype Float4E2M1FN --sf_dtype Float8E8M0FNU --sf_vec_size 16 --c_dtype Float16 --benchmark_mode --use_baseline

site: $(READY)
	.venv/bin/python -m tilelab.course.site $(SITE_ARGS)

$(READY): requirements.txt requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "The course needs Python 3.11 or 3.12: install one, or name it with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install -q $$(grep ^uv= requirements.txt)
	@test -n "$(HAS_GPU)" || .venv/bin/uv pip install -q --no-deps $(CPU_TORCH) $$(grep ^torch= requirements.txt) 2>/dev/null || \
		echo "The CPU build of torch is out of reach; taking the larger one from PyPI."
	.venv/bin/uv pip install -q -r requirements.txt -c requirements.lock
	echo "$(CURDIR)" > $@

# What 19_ch14_languages needs beside CuTe DSL and the libraries, which are in the extra `peers`. It lies in a folder of its
# own, because TileLang wants an older apache-tvm-ffi than CuTe DSL, and cuTile newer compilers than torch.
LANGUAGES := tilelang==0.1.15 apache-tvm-ffi==0.1.12 torch-c-dlpack-ext==0.1.5 z3-solver==4.15.4.0 helion==1.5.1 filecheck==1.0.6 rich==14.3.3
LANGUAGES += markdown-it-py==4.0.0 mdurl==0.1.2
LANGUAGES += cuda-tile==1.7.0 nvidia-cuda-tileiras==13.5.37 nvidia-nvvm==13.5.37 nvidia-cuda-nvcc==13.5.37
LANGUAGES += nvidia-cuda-crt==13.5.37 nvidia-cuda-runtime==13.5.37 nvidia-cuda-cccl==13.3.5.0.6  # for TileLang's nvcc
languages: $(READY)
	.venv/bin/uv pip install -q -e .[peers] -c requirements.lock
	.venv/bin/uv pip install -q --no-deps --target .venv/languages $(LANGUAGES)

# Pin the newest versions that requirements.txt allows, with everything that they need.
lock: $(READY)
	.venv/bin/uv pip compile -q requirements.txt --universal --python-version 3.11 --no-emit-package tiles-in-flight \
		--no-header --no-annotate --upgrade -o requirements.lock

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache

.PHONY: lab demo test lint record compare bench site languages lock clean
