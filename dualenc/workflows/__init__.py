"""The commands of dualenc as Python functions, which return results and never print."""
