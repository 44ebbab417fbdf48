"""`dualenc env`: versions, devices and settings, for a bug report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from cyclopts import Parameter

from dualenc.commands.output import print_line


def env(*, json_file: Annotated[str | None, Parameter(name="--json")] = None) -> None:
    """Print versions, platform, devices, extras and environment variables, for a bug report.

    Secrets are left out: of most variables only the name is shown, and ~ stands for your home
    folder.

    Args:
        json_file: file for the same facts in JSON.
    """
    from dualenc.workflows.environment import environment

    if json_file is not None:
        # Not imported without --json: numpy, which it needs, may be missing.
        from dualenc.io.files import check_file_target, write_json

        check_file_target(json_file)
    found = environment()
    _print_section("", found.system)
    for title in ("torch", "faiss", "packages", "extras", "variables"):
        _print_section(title, getattr(found, title))
    if json_file is not None:
        write_json(json_file, found.as_json())
        print_line(f"the same facts are in {json_file}")


def _print_section(title: str, facts: Mapping[str, object]) -> None:
    """Print a title and a line for each fact."""
    if title:
        print_line(f"{title}:")
    indent = "  " if title else ""
    for name, value in facts.items():
        print_line(f"{indent}{name}: {value}")
    if not facts:
        print_line("  none")
