"""Decoding of masked and block diffusion language models: canvases, policies and the verification of later canvases."""
