"""Training: one loop independent of methods; each learned drafter's module, loss and data are in its own file."""
