"""Ids, vectors and columns in Arrow files."""
