"""Benchmarks of truedraft on the current machine."""
