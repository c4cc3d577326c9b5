"""One call of `generate`: its arguments, what is prepared from them, and what it returns."""
