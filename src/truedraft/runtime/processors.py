"""What the processor can do, and which passes are faster on it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

# Least tokens of a prompt for which the model's own forward is faster than compiled passes, at hidden size WIDE: where
# both have the same instructions, in fp32 on Intel processors, for which torch's matrix products are tuned, in bf16
# by tiles, which torch keeps busier, and in bf16 without instructions for it.
LONG = {"equal": 8192, "intel": 256, "amx_bf16": 1536, "widened": 16384}
WIDE = 768


def long_prompt(dtype: torch.dtype, width: int) -> int:
    """Least tokens of a prompt that a model's own forward reads faster than compiled passes, on this processor.

    Chosen by the processor's vendor and instructions, not by timing, so that a prompt is read the same way, and has
    the same bits, in every call.

    width: hidden size.
    """
    features = processor()
    if dtype != torch.bfloat16:
        kind = "intel" if "GenuineIntel" in features else "equal"
    elif "amx_bf16" in features:
        kind = "amx_bf16"
    else:
        kind = "equal" if "avx512_bf16" in features else "widened"
    if kind == "equal":  # products are faster, attention grows faster
        return round(LONG[kind] * min(width / WIDE, 1.0))
    return round(LONG[kind] * max(WIDE / width, 1.0))  # calls of small layers have a fixed cost


@cache
def processor() -> frozenset[str]:
    """The processor's vendor and flags in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        word for kind in ("vendor_id", "flags") for word in next((x for x in lines if x.startswith(kind)), "").split()
    )
