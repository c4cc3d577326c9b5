"""Drafters that are trained on what the target computes."""
