"""Names of sizes to which a model can be stretched."""

from __future__ import annotations

import re

from truedraft.errors import Refused

# model -> size -> blocks and width. 4 times the width of `nano`, where rounded norms are exact in bf16: 98.6 M and
# 499.7 M weights.
SIZES = {"nano": {"0.1B": (8, 1024), "0.5B": (42, 1024)}}


def size_of(name: str, model: str) -> tuple[int, int]:
    """Blocks and width of a size, one of those in SIZES for the model, or LAYERSxHIDDEN.

    Raises:
        Refused: neither.
    """
    named = SIZES.get(model, {})
    if name in named:
        return named[name]
    if (numbers := re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,5})", name)) is None:
        raise Refused(f"--stretched {name}: give {' or '.join([*named, 'LAYERSxHIDDEN'])}, as in 24x1024")
    return int(numbers[1]), int(numbers[2])
