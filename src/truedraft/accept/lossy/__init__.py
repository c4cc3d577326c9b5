"""Rules that keep more of a draft than the model itself would have said. Reached by asking: rule="lossy/NAME"."""
