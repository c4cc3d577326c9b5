"""Whether a quantised model that was loaded can read: weights that are read wrongly load without an error."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from truedraft.errors import Note

TEXT = (
    "One day, a little girl went to the park with her mother. She saw a big dog, and the dog was happy. The sun was "
    "hot, and the water was cold."
)
SHARE = 0.5  # of the logarithm of the vocabulary's size: models that can read are far below, in two bits too


@torch.no_grad()
def check_predictions(model: Any, tokenizer: Any, name: str) -> None:
    """Compare a decoder's predictions of a short English text with a uniform guess, by one pass over 40 tokens.

    Args:
        name: how messages name it.

    Warns:
        Note: its perplexity is above the square root of the vocabulary's size, or not a number.
    """
    try:
        ids = tokenizer(TEXT, return_tensors="pt").input_ids.to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        nats = float(cross_entropy(logits, ids[0, 1:]))
    except Exception:  # its forward needs more than a text, or fails, of which the check before its use tells more
        return
    if nats < SHARE * math.log(logits.shape[-1]):
        return
    found = (
        "predicts no numbers" if math.isnan(nats) else f"predicts plain English with a perplexity of {_rounded(nats)}"
    )
    warnings.warn(
        f"{name}: it {found} (a blind guess among its tokens has {logits.shape[-1]:,}): its weights are damaged, or "
        "read wrongly, unless it was made for other texts; compare it with the model before quantisation, or give that",
        Note,
        stacklevel=4,
    )


def _rounded(nats: float) -> str:
    return f"{math.exp(nats):,.0f}" if nats < 20 else f"{math.exp(min(nats, 700.0)):.0e}"
