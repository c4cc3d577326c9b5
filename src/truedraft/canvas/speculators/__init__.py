"""Speculators: later canvases that are verified together."""
