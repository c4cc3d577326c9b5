"""Acceptance rules: how much of a draft is kept. One file per rule."""
