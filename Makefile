# Shortcuts for development; see CONTRIBUTING.md.
.PHONY: quick all nightly lint docs

quick:  ## the fast tests, about a minute
	pytest -n 2 -m "not slow"

all:  ## all tests but the nightly ones
	pytest -n 2

nightly:  ## long matrices, kills and soaks
	pytest -n 2 -m nightly

lint:  ## formatting, types and imports
	ruff check . && ruff format --check . && mypy && lint-imports

docs:  ## the site, offline, with every link checked
	mkdocs build --strict
