"""Recipes: YAML files that name classes and their arguments."""
