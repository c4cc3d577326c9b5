"""Drafters with a diffusion language model: masks behind a row's text are filled in one pass."""
