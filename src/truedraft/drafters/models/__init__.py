"""Drafters that are language models themselves."""
