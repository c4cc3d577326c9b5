"""Views of diffusion models that attend to the whole canvas: lighter passes over it, another text."""
