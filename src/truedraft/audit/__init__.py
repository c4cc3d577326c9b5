"""Audits of exactness on this machine: tokens against `model.generate`, and distributions by statistical tests."""
