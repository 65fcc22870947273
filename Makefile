# Names for the two scripts and the small steps of development; the scripts work without make.
.PHONY: quickstart test format docs clean

quickstart:
	./scripts/quickstart

test:
	./scripts/test

format:
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

docs:
	.venv/bin/mkdocs serve

clean:
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache .hypothesis
