"""Views of a target: the same weights run lighter. One file per view; `_base.py` is the contract."""
