"""Lossy rules, which change the distribution of the text to accept more of a draft: `rule="lossy/NAME"`."""
