"""Drafters that the target's own passes refine: guesses read beside the text until they agree."""
