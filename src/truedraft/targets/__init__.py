"""Targets: models that score draft trees, cache the KV of rows and commit accepted paths."""
