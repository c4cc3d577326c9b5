"""Memory plans: what a model and its drafter will allocate, from configurations and file headers; nothing is loaded."""
