"""Migrate an index to another embedding model."""
