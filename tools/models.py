"""Write docs/models.md from a trial of every model class of `transformers`: python tools/models.py"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import model_types  # noqa: E402
from truedraft.files import write_whole  # noqa: E402

if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found = {}
    for kind, name in model_types.classes():
        print(kind, name, flush=True)
        found[kind, name] = model_types.outcome(kind, name)
    write_whole(ROOT / "docs" / "models.md", model_types.page(found))
