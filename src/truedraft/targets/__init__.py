"""Models as targets: what scores draft trees, keeps the KV of rows, and commits accepted paths."""
