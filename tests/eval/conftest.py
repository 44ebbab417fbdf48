"""The run of the commands that scripts measure."""

from tests.commands.conftest import classes, short_run

__all__ = ["classes", "short_run"]
