"""Drafters of which one drafts for a row at a time: chosen by its text, or by the confidence of their drafts."""
