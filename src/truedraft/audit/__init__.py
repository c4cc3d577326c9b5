"""Is it exact here? The token audit compares what is said, token by token; the law audit how often it is said."""
