"""The device and the processes of a command."""

from dualenc.evaluation.output import start_processes

__all__ = ["start_processes"]
