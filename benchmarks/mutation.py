"""Mutation testing: how many small changes of the code the fast direct tests detect.

    python benchmarks/mutation.py                                # all of [tool.mutmut]; half an hour on a core
    python benchmarks/mutation.py 'truedraft.tree*'              # mutants whose names match
    python benchmarks/mutation.py --survivors 'truedraft.tree*'  # again only those that were not killed
    python benchmarks/mutation.py --figures --json OUT           # figures of earlier runs, without a new one

mutmut makes the mutants of a copy of the repository (`mutants/`, not in git) and runs for each the tests that reach the
function it changes. Verdicts are kept there until the function changes. Survivors are listed with the reasons in
`REASONS`; one without a reason is a test that is missing. It needs `pip install -e '.[dev,mutation]'`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from truedraft.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
STATES = ("killed", "survived", "timeout", "no tests", "other", "not run")
FOUND = ("killed", "timeout")  # a mutant that never ends is detected too


@dataclass(frozen=True)
class Mutant:
    """One change of one function: its name at mutmut, its module, and its state."""

    name: str
    module: str
    state: str

    @property
    def survived(self) -> bool:
        return self.state not in (*FOUND, "not run")


@dataclass(frozen=True)
class Reason:
    """Why mutants survive: those whose changed lines match `change` and whose names match `mutants`."""

    why: str
    mutants: str = "*"
    change: str = ""

    def fits(self, mutant: Mutant, diff: str) -> bool:
        return fnmatch.fnmatchcase(mutant.name, self.mutants) and re.search(self.change, diff) is not None


SAME = "the same result in another way, with more work, or for arguments that no caller passes"
ROUNDING = "a guard against rounding, or a bound that no test reaches exactly"
SEARCH = "another step of a search that still ends at the same point, perhaps in more rounds"
SLOWER = "other weights of learnt or measured figures: slower at worst, the same text"
CRASH = (
    "the compiled pass writes beyond a cache of that shape, and the process ends: detected, without a state in mutmut"
)
REASONS = (
    Reason(
        "zip's check of lengths that come from one list: it detects faults elsewhere",
        change=r"(?m)^\+.*(strict=(None|False)|, \))",
    ),
    Reason(SEARCH, "*.k_seq.x__least__*"),
    Reason(SEARCH, "*._optimum.x__least__*"),
    Reason(ROUNDING, "*._optimum.x__all_inside__*"),
    Reason(ROUNDING, "*._optimum.*", r"(?m)^\+.*clamp_max\(2\.0\)"),
    Reason(SAME, "*._optimum.*", r'(?m)^\+.*("XXindependentXX"|"INDEPENDENT"|certain, 1\.0)'),
    Reason(ROUNDING, change=r"(?m)^\+.*min\(.*, 2\.0\)"),
    Reason(SAME, "*.sampling.*", r"(?m)^\+.*(type\(None\) in|\(None, raw|:1\]|scores\[i : i \+ 2\])"),
    Reason(SAME, "*.sampling.*", r"(?m)^\+.*(first <= row\.step|first >= row\.step|\(self\.processors\) or True)"),
    Reason(SAME, "*.stopping.*", r"(?m)^\+.*type\(None\) not in"),
    Reason(SAME, "*.caches.*", r"(?m)^\+.*(torch\.empty\(|move\(last, slot, None\)|_all\[1\]\.shape)"),
    Reason(
        SAME, "*.tree.*", r"(?m)^\+.*(range\(len\(self\)\)|len\(self\) < depth|not 0 <= i < n|\(self\.probes\) or True)"
    ),
    Reason(SAME, "*.accept.*", r"(?m)^\+.*(softmax\(\+1\)|p_token >= 0|p_token > q_token|\[1\] if row\.ended)"),
    Reason(SAME, "*._rounds.*", r"(?m)^\+.*(\[\+1\]|\[-2\]|laws\[:, 1\])"),
    Reason(SAME, "*.k_seq.x__tried__*"),
    Reason(SAME, "*.tree.*", r"(?m)^\+.*(adjacent|parts\[1\]\.hidden)"),
    Reason(SAME, "*.engine.*", r'(?m)^\+.*(_cohort.* = ""|row\.room \+ row\.step|\) and False else \[values)'),
    Reason(SLOWER, "*.engine.*", r"(?m)^\+.*(id\(None\)|nodes \+ sum)"),
    Reason(SAME, "*._ties.*", r"(?m)^\+.*(\) and False else keys|len\(paths\[0\]\) - 2)"),
    Reason(CRASH, "*.caches.rows.*lazy_initialization*", r"(?m)^\+.*torch\.zeros\("),
)


def recorded(patterns: Sequence[str]) -> list[Mutant]:
    """Mutants whose names match, with the states of the last runs."""
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.stats import status_by_exit_code
    from mutmut.utils.file_utils import walk_mutatable_files

    found = []
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        module = path.relative_to("src").with_suffix("").as_posix()
        for name, code in data.exit_code_by_key.items():
            state = "not run" if code is None else status_by_exit_code[code]
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                found.append(Mutant(name, module, state if state in STATES else "other"))
    return found


def changed(mutant: Mutant) -> str:
    """The lines that a mutant removes and adds."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    lines = get_diff_for_mutant(mutant.name, path=f"src/{mutant.module}.py").splitlines()
    return "\n".join(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def test(names: Sequence[str]) -> None:
    """Run the mutants of these names or patterns, one at a time."""
    subprocess.run([sys.executable, "-m", "mutmut", "run", "--max-children", "1", *names], cwd=ROOT, check=True)


def explained(mutants: Sequence[Mutant]) -> Iterator[tuple[Mutant, str, str]]:
    """Survivors with their changes and the reasons why they survive; an empty reason where none is listed."""
    for mutant in mutants:
        if mutant.survived:
            diff = changed(mutant)
            yield mutant, diff, next((reason.why for reason in REASONS if reason.fits(mutant, diff)), "")


def shares(mutants: Sequence[Mutant]) -> dict[str, Mapping[str, float]]:
    """By module and in all: mutants by state, and the fraction detected of those that were run."""
    counts: dict[str, Counter[str]] = {}
    for mutant in mutants:
        for key in (mutant.module, "all"):
            counts.setdefault(key, Counter())[mutant.state] += 1
    modules = [*sorted(key for key in counts if key != "all"), *(["all"] if counts else [])]
    return {
        key: {
            **{state: counts[key][state] for state in STATES},
            "share": round(_found(counts[key]), 4),
        }
        for key in modules
    }


def _found(counts: Counter[str]) -> float:
    run = counts.total() - counts["not run"]
    return sum(counts[state] for state in FOUND) / run if run else 0.0


def show(figures: Mapping[str, Mapping[str, float]], survivors: Sequence[tuple[Mutant, str, str]]) -> None:
    console, table = Console(), Table(Column("module", no_wrap=True), *STATES, "found")
    for module, row in figures.items():
        table.add_row(module.removeprefix("truedraft/"), *(str(row[state]) for state in STATES), f"{row['share']:.1%}")
    console.print(table)
    for why, count in Counter(why or "NO REASON YET" for _, _, why in survivors).most_common():
        console.print(f"{count:4}  {why}", highlight=False)
    for mutant, diff, why in survivors:
        if not why:
            console.print(f"\n{mutant.name}\n{diff}", markup=False, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of mutants, as in truedraft.tree*")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--survivors", action="store_true", help="run only what was not killed before")
    how.add_argument("--figures", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, help="write figures and survivors here")
    args = parser.parse_args()
    if args.survivors:
        if names := [mutant.name for mutant in recorded(args.patterns) if mutant.state not in FOUND]:
            test(names)
    elif not args.figures:
        test([] if args.patterns == ["*"] else args.patterns)
    mutants = recorded(args.patterns)
    figures, survivors = shares(mutants), list(explained(mutants))
    show(figures, survivors)
    if args.json:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {"python": platform.python_version(), **{n: version(n) for n in ("mutmut", "torch")}},
            "modules": figures,
            "survivors": [
                {**asdict(mutant), "why": why, "change": diff.splitlines()} for mutant, diff, why in survivors
            ],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_whole(args.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
