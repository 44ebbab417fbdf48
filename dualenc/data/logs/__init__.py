"""Logs of search systems: what users were shown and did, one file per shape of log."""
