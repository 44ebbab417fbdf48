"""Checks of stored vectors for an alarm: each is a function that returns findings."""
