"""The main job on data that every machine has: its own documentation."""
