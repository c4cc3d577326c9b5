"""Drafters that run the target itself, under a view (truedraft/views)."""
