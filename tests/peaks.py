"""Measures the peak memory of a call in this process: run by `test_planning.py`, one process for each setup.

    python tests/peaks.py LAYERSxHIDDEN DRAFT ROWS PROMPT NEW DTYPE

Prints bytes: what the setup held at once beyond a process that has run another model, and what was planned.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft.bench.sizes import size_of
from truedraft.bench.stretched import stretched
from truedraft.loading import load
from truedraft.planning.plan import planned


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run(size: str, draft: str, rows: int, prompt: int, new: int, dtype: str) -> dict[str, int]:
    plan = planned("nano", draft, rows, prompt + new, 64 << 30, dtype=dtype, stretched=size, free=lambda device: 0)
    model, tokenizer = load("nano", dtype)
    ids = torch.randint(5, 4000, (rows, prompt), generator=torch.Generator().manual_seed(0))
    own: Any = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed", release_weights=False)
    own.generate(ids[:1, :8], max_new_tokens=8, attention_mask=torch.ones_like(ids[:1, :8]))
    del own
    gc.collect()
    layers, hidden = size_of(size, "nano")
    larger = stretched(model, layers=layers, hidden=hidden)
    gc.collect()
    before = resident("VmRSS") - sum(tensor.nbytes for tensor in larger.parameters())  # torch keeps more in bf16
    forget_peak()
    fast: Any = truedraft.accelerate(larger, tokenizer, draft=draft, control="fixed", release_weights=True)
    fast.generate(ids, max_new_tokens=new, min_new_tokens=new, attention_mask=torch.ones_like(ids))
    held = resident("VmHWM") - before
    return {"held": held, "planned": plan.needed}


if __name__ == "__main__":
    size, draft, *numbers, dtype = sys.argv[1:]
    print(json.dumps(run(size, draft, *map(int, numbers), dtype)))  # type: ignore[arg-type]
