# Paths are relative so that a checkout may live anywhere, also below a name with spaces.
# Threads: two suit the demo's small shapes, and one each of two processes the tests'; set your own to override.
TEST_WORKERS ?= 2
demo: export OMP_NUM_THREADS ?= 2
test: export OMP_NUM_THREADS ?= 1
PYTHON_SOURCES := megatron_nvfp4 setup.py tests tools examples

.PHONY: demo test venv lint clean

demo: venv
	.venv/bin/python examples/demo.py $(DEMO_ARGS)

test: venv
	.venv/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(TEST_ARGS)

venv:
	@bash tools/make_venv.sh

lint: venv
	.venv/bin/python -m ruff check $(wildcard $(PYTHON_SOURCES))
	.venv/bin/python -m ruff format --check $(wildcard $(PYTHON_SOURCES))
	find csrc -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' | sort \
		| xargs .venv/bin/clang-format --dry-run -Werror

clean:
	rm -rf .venv build dist runs *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -f megatron_nvfp4/_C*.so megatron_nvfp4/_blackwell*.so megatron_nvfp4/_build_info.py
	find megatron_nvfp4 tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
