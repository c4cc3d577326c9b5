"""Training: one loop that knows no method; each learned drafter's module, loss and data are in its own file."""
