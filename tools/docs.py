"""Write the generated parts of the documents, or check that they are fresh: python tools/docs.py [--check]

A part is between `<!-- generated: NAME ARGUMENTS -->` and `<!-- end -->`; `PARTS` maps NAME to its writer. Links
from a name in code to the file that defines it follow the name. Nothing else of a document is touched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from pages import figures, methods, rooms, serving, source, weights
from truedraft.files import write_whole

ROOT = source.ROOT
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS.append(ROOT / "benchmarks" / "README.md")
PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->\n)", re.S)
CODE = "python source"  # the info string of blocks that quote the package

PARTS: dict[str, Callable[..., list[str]]] = {
    "quote": lambda document, name: [f"```{CODE}", source.quoted(name), "```"],
    "signatures": lambda document, name: [f"```{CODE}", source.signatures(name), "```"],
    "contracts": lambda document: source.contracts(),
    "rooms": rooms.table,
    "modules": rooms.single,
    "imports": lambda document: rooms.directions(),
    "new-things": rooms.new_things,
    "index": lambda document: methods.index(),
    "needs": lambda document: methods.by_needs(),
    "methods": lambda document: methods.sections(),
    "prompts": lambda document: figures.prompts(),
    "activations": lambda document: figures.activations(),
    "ties": lambda document: figures.ties(),
    "ties-real": lambda document, *of: figures.ties_real(*of),
    "equivalence": lambda document: figures.equivalence(),
    "heads": lambda document: figures.heads(),
    "stopping": lambda document: figures.stopping(),
    "staged": lambda document: figures.staged(),
    "draft-training": lambda document: figures.draft_training(),
    "shapes": lambda document: figures.shapes(),
    "shared-drafters": lambda document, part: figures.shared_drafters(part),
    "trained-heads": lambda document: figures.trained_heads(),
    "head-passes": lambda document: figures.head_passes(),
    "views": lambda document, part: figures.views(part),
    "experts": lambda document, part: figures.experts(part),
    "specialists": lambda document: figures.specialists(),
    "replay": lambda document, *drafters: figures.replay(*drafters),
    "recorded": lambda document: figures.recorded(),
    "peers": lambda document, *which: figures.peers(*which),
    "real": lambda document, *of: figures.real(*of),
    "quantised": lambda document, *of: weights.quantised(*of),
    "audited": lambda document: figures.audited(),
    "answers": lambda document, *of: weights.answers(*of),
    "widths": lambda document, *of: weights.widths(*of),
    "large-pages": lambda document: weights.large_pages(),
    "never-slower": lambda document: figures.never_slower(),
    "speeds": lambda document: figures.speeds(),
    "passes": lambda document: figures.passes(),
    "serve": lambda document, part: figures.serve(part),
    "vocabularies": lambda document: figures.vocabularies(),
    "serve-settings": lambda document: serving.settings(),
    "serve-parameters": lambda document: serving.parameters(),
    "whole-calls": lambda document: figures.whole_calls(),
}


def filled(text: str, document: Path) -> str:
    """A document with every generated part and link as the source has it now.

    Raises:
        source.Unknown: a part or a name that does not exist.
    """

    def renewed(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        if name not in PARTS:
            raise source.Unknown(f"there is no generated part {name!r}")
        lines = "\n".join(PARTS[name](document, *arguments)).strip("\n")
        return f"{match[1]}\n{lines}\n\n{match[3]}"

    return source.linked(PART.sub(renewed, text), document)


def main() -> int:
    stale = []
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        try:
            fresh = filled(text, document)
        except source.Unknown as why:
            print(f"{document.relative_to(ROOT)}: {why}", file=sys.stderr)
            return 1
        if fresh != text:
            stale.append(str(document.relative_to(ROOT)))
            if "--check" not in sys.argv[1:]:
                write_whole(document, fresh)
    if stale and "--check" in sys.argv[1:]:
        print(f"{', '.join(stale)}: stale; run python tools/docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
