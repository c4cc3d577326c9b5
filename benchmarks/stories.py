"""The beginnings of stories that benchmarks of draft models decode."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from truedraft import assets

LENGTH = 64  # tokens of a beginning at most


def beginnings(tokenizer: Any, count: int | None = None) -> list[Tensor]:
    """(1, n) token ids of the first `count` embedded stories, of all by default."""
    texts = [assets.prompt("story.txt"), *assets.prompt("stories.txt").split("\n\n")][:count]
    return [tokenizer(text, return_tensors="pt", return_token_type_ids=False).input_ids[:, :LENGTH] for text in texts]
