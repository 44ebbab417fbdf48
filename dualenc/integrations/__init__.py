"""Objectives in training loops of other libraries, one file per library."""
