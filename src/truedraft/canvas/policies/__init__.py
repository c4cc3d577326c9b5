"""Policies: which positions a step of a diffusion model fixes."""
