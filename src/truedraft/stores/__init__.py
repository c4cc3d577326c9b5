"""Data structures in which drafters look up continuations: corpora, automata, tables of successors and memories."""
