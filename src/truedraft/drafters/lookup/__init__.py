"""Drafters that copy: what followed the same tokens before, in the text, documents, corpora or earlier outputs."""
