"""Fuzzing with random knobs, files, masks and embeddings: python tools/fuzz.py [--seed 0] [--out FILE] [KIND ...]

Every case must end in good time: in a result, in `Refused`, or in an exception where `model.generate` raises one for
the same prompt ("declined"). Any other end is a finding: another exception, a crash, a case that does not
end. Cases run in children of this process, so that a crash ends one child alone, and each follows from seed, kind and
number: `--only masks:4711` runs one here. The exit status is 1 where anything was found.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

COUNTS = {"knobs": 40_000, "files": 40_000, "masks": 12_000, "embeddings": 12_000}
LIMIT = 30.0  # seconds of a case, after which it counts as hung
CRASHES = 40  # of a kind, after which the rest of it is left out
GOOD = ("result", "refused", "declined")
EXAMPLES = 3  # of every finding that are shown
Case = Callable[[random.Random], None]


def some(pick: random.Random, *options: Any) -> Any:
    return pick.choice(options)


def number(pick: random.Random) -> Any:
    """Numbers of all sizes, and values that are no numbers."""
    return some(
        pick, 0, 1, 2, 3, -1, pick.randrange(-9, 99), 2 ** pick.randrange(70), -(2 ** pick.randrange(70)), 10**400,
        float("nan"), float("inf"), -float("inf"), pick.uniform(-2, 2), 10 ** pick.uniform(-300, 300), True, None, "7",
        [1], b"1", 1j,
    )  # fmt: skip


def text(pick: random.Random) -> str:
    letters = some(pick, "0123456789x;", "x;,:=+|?>()[]'\" \n\0é\ud800", "0123456789.e-_")
    return "".join(pick.choices(letters, k=pick.randrange(12)))


# knobs


def knobs_cases() -> Case:
    """Methods with random knobs; of those that need no model, drafts after random text."""
    import dataclasses

    import torch

    from truedraft import registry
    from truedraft.card import Range, values_of
    from truedraft.drafters._base import Drafter
    from truedraft.tree import Accepted, DraftTree, Row, Scores

    methods = [(kind, name) for kind in registry.KINDS for name in registry.names(kind)]
    size = 61

    def value(pick: random.Random, method: type, field: Any) -> Any:
        values = values_of(method, field.name)
        if isinstance(values, Range) and pick.random() < 0.8:
            high = min(values.high, some(pick, 4, 64, values.high))
            if values.kind is int:
                return pick.randint(int(values.low), max(int(high), int(values.low)))
            return pick.uniform(values.low, max(high, values.low))
        return some(pick, number(pick), text(pick), field.default)

    def drafted(pick: random.Random, drafter: Drafter) -> None:
        tokens = [pick.randrange(some(pick, 3, size)) for _ in range(pick.randint(1, 60))]
        row = Row(0, tokens, len(tokens), 40, references=((1, 2, 3, 1, 2), (5,)) if pick.random() < 0.5 else ())
        drafter.start([row])
        for _ in range(3):
            (tree,) = drafter.propose([row], [some(pick, 0, 1, 16, drafter.width)])
            tree = tree.cut(64)
            path = [0]
            while below := [c for c in tree.shape.children[path[-1]] if c not in tree.probes]:
                path.append(pick.choice(below))
            path = path[: pick.randint(1, len(path))]
            token = pick.randrange(size)
            row.tokens += [*(tree.tokens[node] for node in path[1:]), token]
            scores = Scores(torch.randn(1, len(tree), size), {}, [0])
            drafter.observe([row], [tree], scores, [Accepted(tuple(path), token, False)])
            assert isinstance(tree, DraftTree)
        drafter.end(row)

    def case(pick: random.Random) -> None:
        kind, name = pick.choice(methods)
        method = registry.method(kind, name)
        fields = [f for f in dataclasses.fields(method) if f.name != "corpus" or pick.random() < 0.1]
        given = {f.name: value(pick, method, f) for f in pick.sample(fields, pick.randint(0, min(3, len(fields))))}
        if pick.random() < 0.3:
            settings = ",".join(
                f"{key}={one}" for key, one in given.items() if not isinstance(one, int) or one < 10**99
            )
            made = registry.load(kind, f"{name}:{settings}" + some(pick, "", "", text(pick)))
        else:
            made = registry.load(kind, name, **given)
        if kind == "drafters" and not method.card.needs:
            drafted(pick, made)

    return case


# files


def files_cases() -> Case:
    """Corpora, memories and datastores, damaged: as bytes, and as wrong arrays under valid checksums."""
    import numpy as np
    import torch
    from safetensors import safe_open
    from safetensors.numpy import save_file

    from corpus_readers import drafts_of, found_in
    from truedraft import Corpus
    from truedraft.stores import _file
    from truedraft.stores.memory import Memory
    from truedraft.stores.neighbours import Neighbours

    folder = Path(tempfile.mkdtemp(prefix="truedraft-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    here, pick = folder / f"case-{os.getpid()}", random.Random(0)
    for k, (documents, size) in enumerate([(5, 3), (1, 12), (9, 2)]):
        Corpus.built([[pick.randrange(size) for _ in range(80)] for _ in range(documents)]).save(folder / f"{k}.tdc")
    memory = Memory(1000)
    for name in "aab":
        memory.add(name, [pick.randrange(9) for _ in range(20)])
    memory.save(folder / "3.tdm")
    states = torch.randn(38, 4)
    Neighbours(0, ("a", "b"), (0, 20, 40), torch.randint(9, (40,)), states).save(folder / "4.tdn")
    originals = [path.read_bytes() for path in sorted(folder.iterdir())]
    parts = []
    for path in sorted(folder.iterdir()):
        with safe_open(str(path), framework="np") as file:
            parts.append(({name: file.get_tensor(name) for name in file.keys()}, file.metadata()))  # noqa: SIM118

    def used(which: int) -> None:
        if which < 3:
            corpus = Corpus.open(here)
            drafts_of(corpus)
            found_in(corpus)
            corpus.check_vocabulary(2**31)
        elif which == 3:
            Memory(500).load(here, None, vocabulary=9)
        else:
            store = Neighbours.open(here)
            close = store.compared(torch.randn(1, store.keys.shape[1]))
            _, places = store.nearest(close[0], 5)
            for place in places.tolist():
                store.behind(place, 7)
                store.source(place)

    def damaged(pick: random.Random, content: bytes) -> bytes:
        data = bytearray(content)
        for _ in range(pick.randint(1, 4)):
            at = pick.randrange(len(data)) if data else 0
            change = pick.randrange(6)
            if change == 0:
                data[at : at + 1] = pick.randbytes(1)
            elif change == 1:
                del data[at:]
            elif change == 2:
                data += pick.randbytes(pick.randrange(99))
            elif change == 3:
                length = some(pick, 0, 8, 2**63, len(data), pick.randrange(2 ** pick.randrange(40)))
                data[:8] = struct.pack("<Q", length)
            elif change == 4:
                data[at : at + 4] = struct.pack("<i", some(pick, -1, 0, 1, 2**31 - 1, -(2**31), pick.randrange(999)))
            else:
                end = pick.randrange(len(data) + 1)
                data[at:end] = bytes(data[at:end])[::-1]
        return bytes(data)

    def inconsistent(pick: random.Random, which: int) -> None:
        arrays, metadata = {name: array.copy() for name, array in parts[which][0].items()}, dict(parts[which][1])
        for _ in range(pick.randint(1, 3)):
            name = pick.choice(list(arrays)) if arrays else "token"
            array = arrays.get(name, np.zeros(1, np.int32))
            change = pick.randrange(8)
            if change == 0:
                arrays.pop(name, None)
            elif change == 1:
                arrays[name] = array[: pick.randrange(array.size + 1)]
            elif change == 2:
                arrays[name] = array.astype(some(pick, np.int8, np.int64, np.float32, np.uint16, np.bool_))
            elif change == 3:
                arrays[name] = array.reshape(1, *array.shape)
            elif array.size:
                flat, at = array.reshape(-1), pick.randrange(array.size)
                new = some(pick, -1, 0, 1, 2**31 - 1, -(2**31), pick.randrange(array.size), float(flat[at]) + 1)
                flat[at] = np.array(new).astype(array.dtype)
        config = json.loads(metadata["config"])
        if pick.random() < 0.2:
            config[pick.choice([*config, "more"])] = some(pick, number(pick), text(pick), [1, 2], {}, [[]])
        try:
            metadata["config"] = json.dumps(config)
            metadata["checksums"] = json.dumps(_file._checksums(arrays, metadata["config"]))
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, str(here), metadata)
        except (TypeError, ValueError, UnicodeError):  # cannot be written
            here.write_bytes(b"")

    def case(pick: random.Random) -> None:
        which = pick.randrange(len(parts))
        if pick.random() < 0.4:
            here.write_bytes(damaged(pick, originals[which]))
        else:
            inconsistent(pick, which)
        used(which)

    return case


# prompts


class Declined(Exception):
    """`model.generate` raises for the same prompt."""


def tensor(pick: random.Random, given: Any) -> Any:
    """A tensor in another dtype or layout, or as something else."""
    import torch

    change = pick.randrange(12)
    if change < 4:
        return given
    if change == 4:
        return given.to(some(pick, torch.bool, torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float64))
    if change == 5:
        return given.repeat_interleave(2, -1)[..., ::2]
    if change == 6 and given.ndim > 1:
        return given.transpose(0, 1).contiguous().transpose(0, 1)
    if change == 7:
        return some(pick, given.tolist(), given.numpy(), None, given.to("meta"))
    if change == 8:
        return given.unsqueeze(some(pick, 0, -1))
    if change == 9:
        return given[some(pick, slice(0), slice(1), slice(None, None, 2), *([0] if len(given) else []))]
    if change == 10:
        return given[..., some(pick, slice(1, None), slice(0), slice(-1))]
    return torch.cat([given, given[..., -1:]], -1)


def mask_of(pick: random.Random, rows: int, length: int) -> Any:
    import torch

    made = torch.ones(rows, length, dtype=torch.long)
    change = pick.randrange(9)
    for row in range(rows):
        pad = pick.randrange(length + 1)
        if change == 0:
            made[row, :pad] = 0
        elif change == 1:
            made[row, pad:] = 0
        elif change == 2:
            made[row] = torch.tensor([pick.randrange(2) for _ in range(length)])
        elif change == 3:
            made[row, :pad] = some(pick, -1, 2, 2**40)
    if change == 4:
        made = made.float() * some(pick, 0.0, 0.5, float("nan"), -float("inf"), 1e30)
    if change == 5:
        made = torch.ones(rows, 1, length, length, dtype=torch.long).tril()
    if change == 6:
        made = torch.ones(max(rows + pick.randint(-2, 2), 0), max(length + pick.randint(-3, 3), 0), dtype=torch.long)
    return tensor(pick, made)


def generating(prompt: Callable[[random.Random, Any], dict[str, Any]]) -> Case:
    """Calls of a tiny model by the compiled pass, with and without drafts."""
    import torch

    import truedraft
    from models import tiny
    from truedraft import Refused

    torch.set_num_threads(1)
    model = tiny(dtype=torch.float32)
    drafts = (None, "suffix+token-recycling", "lookahead", "prompt-lookup")
    fast = [truedraft.accelerate(model, draft=draft, control="fixed") for draft in drafts]

    def case(pick: random.Random) -> None:
        made = pick.choice(fast)
        given = prompt(pick, model)
        torch.manual_seed(pick.randrange(9))
        settings = {"max_new_tokens": pick.randint(1, 4), "do_sample": pick.random() < 0.3}
        try:
            made.generate(**given, **settings)
        except Refused:
            raise
        except Exception as error:
            try:
                model.generate(**given, **settings)
            except Exception as plain:
                raise Declined from plain
            raise error

    return case


def masks_cases() -> Case:
    """Prompts of token ids with random attention masks."""
    import torch

    def prompt(pick: random.Random, model: Any) -> dict[str, Any]:
        rows, length, size = pick.randint(1, 3), pick.randint(1, 12), model.config.vocab_size
        ids = torch.tensor([[pick.randrange(size) for _ in range(length)] for _ in range(rows)])
        if pick.random() < 0.1:
            ids[0, pick.randrange(length)] = some(pick, -1, size, size + 3, 2**31, -(2**40), 2**62)
        return {
            "input_ids": tensor(pick, ids) if pick.random() < 0.2 else ids,
            "attention_mask": mask_of(pick, rows, length),
        }

    return generating(prompt)


def embeddings_cases() -> Case:
    """Prompts of embeddings, of other widths, dtypes and layouts; some with ids or a mask."""
    import torch

    def prompt(pick: random.Random, model: Any) -> dict[str, Any]:
        rows, length, width = pick.randint(1, 3), pick.randint(1, 12), model.config.hidden_size
        if pick.random() < 0.3:
            width = some(pick, 0, 1, width - 1, width + 1, 2 * width, 1000)
        made = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(pick.randrange(99)))
        if pick.random() < 0.2 and made.numel():
            made.view(-1)[pick.randrange(made.numel())] = some(pick, float("nan"), float("inf"), 1e38, -1e-45)
        given: dict[str, Any] = {"inputs_embeds": tensor(pick, made)}
        if pick.random() < 0.4:
            given["attention_mask"] = mask_of(pick, rows, length)
        if pick.random() < 0.1:
            given["input_ids"] = torch.randint(3, model.config.vocab_size, (rows, some(pick, length, 1)))
        return given

    return generating(prompt)


CASES = {"knobs": knobs_cases, "files": files_cases, "masks": masks_cases, "embeddings": embeddings_cases}


# running


def outcome(case: Case, pick: random.Random) -> tuple[str, str]:
    """The end of a case, and its place."""
    from truedraft import Refused

    try:
        case(pick)
    except Refused as refused:
        return ("refused", "") if "\n" not in str(refused) else ("refused in several lines", str(refused))
    except Declined:
        return "declined", ""
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(place.filename).name}:{place.name}", str(error)[:200]
    return "result", ""


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings of libraries about nonsense are no findings."""
    import logging
    import warnings

    import transformers

    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def child(kind: str, seed: int, first: int, last: int, at: mmap.mmap, out: int) -> None:
    """Run cases one after the other; `at` holds the current number, `out` receives a line for each that has ended."""
    with quiet(), os.fdopen(out, "w", buffering=1) as lines:
        case = CASES[kind]()
        for number in range(first, last):
            at[:8] = struct.pack("<q", number)
            print(json.dumps([number, *outcome(case, random.Random(f"{seed} {kind} {number}"))]), file=lines)
        at[:8] = struct.pack("<q", last)


def ended(pid: int, at: mmap.mmap) -> str | None:
    """Wait for a child; returns its fault, None for none. A child whose case takes too long is killed."""
    before, since = -1, time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if os.WIFSIGNALED(status):
                return f"crash: {signal.Signals(os.WTERMSIG(status)).name}"
            return None if os.WEXITSTATUS(status) == 0 else f"crash: exit status {os.WEXITSTATUS(status)}"
        (now,) = struct.unpack("<q", at[:8])
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > LIMIT + (90 if now < 0 else 0):  # imports come before the first case
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hang"
        time.sleep(0.02)


def run(kind: str, seed: int, count: int, found: dict[str, list[str]]) -> Counter[str]:
    """Run all cases of a kind; returns counts of their ends. found: findings with examples, extended."""
    counts: Counter[str] = Counter()
    at = mmap.mmap(-1, 8)
    first = crashes = 0
    while first < count and crashes < CRASHES:
        at[:8] = struct.pack("<q", -1)
        with tempfile.TemporaryFile("w+") as lines:
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                try:
                    child(kind, seed, first, count, at, os.dup(lines.fileno()))
                except BaseException:
                    traceback.print_exc()
                    os._exit(3)
                os._exit(0)
            why = ended(pid, at)
            lines.seek(0)
            for line in lines:
                number, what, more = json.loads(line)
                counts[what] += 1
                if what not in GOOD:
                    found.setdefault(what, []).append(f"{kind}:{number} {more}")
        (here,) = struct.unpack("<q", at[:8])
        if why is not None:
            crashes += 1
            counts[why] += 1
            found.setdefault(why, []).append(f"{kind}:{here}")
            if here < 0:
                break
        first = here + 1
    if first < count:
        counts["left out"] = count - first
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help=f"of the usual number of cases, {COUNTS}")
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one case, in this process, with its traceback")
    options = parser.parse_args()
    if options.only:
        kind, _, number = options.only.partition(":")
        CASES[kind]()(random.Random(f"{options.seed} {kind} {number}"))
        return 0
    import transformers  # noqa: F401  imported once, before the children are forked

    import truedraft  # noqa: F401

    found: dict[str, list[str]] = {}
    cases: dict[str, dict[str, int]] = {}
    seconds = {}
    for kind in options.kinds or CASES:
        began = time.perf_counter()
        cases[kind] = dict(run(kind, options.seed, int(COUNTS[kind] * options.share), found).most_common())
        seconds[kind] = round(time.perf_counter() - began, 1)
        print(f"{kind}: {sum(cases[kind].values()):,} cases in {seconds[kind]:,} s: {cases[kind]}", flush=True)
    for what, examples in found.items():
        print(f"{what}: {len(examples)} times, for instance", *examples[:EXAMPLES], sep="\n    ")
    sanitized = "libasan" in os.environ.get("LD_PRELOAD", "")
    result = {"seed": options.seed, "sanitized": sanitized, "cases": cases, "seconds": seconds}
    result["total"] = sum(sum(counts.values()) for counts in cases.values())
    result["findings"] = {what: examples[:EXAMPLES] for what, examples in found.items()}
    if options.out:
        from truedraft.files import write_whole

        write_whole(options.out, json.dumps(result, indent=2) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
