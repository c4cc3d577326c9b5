"""Write docs/matrix.md from a run of every method with every feature: python tools/matrix.py"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import matrix  # noqa: E402
from truedraft.files import write_whole  # noqa: E402

if __name__ == "__main__":
    found = {}
    for kind, name in matrix.methods():
        print(kind, name, flush=True)
        found[kind, name] = matrix.cells(kind, name)
    write_whole(ROOT / "docs" / "matrix.md", matrix.page(found))
