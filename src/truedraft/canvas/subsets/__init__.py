"""Drafters of any-subset models: tokens at masked positions that one pass verifies."""
