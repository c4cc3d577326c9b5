"""Measurements of truedraft on the machine at hand."""
