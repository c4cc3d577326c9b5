"""truedraft and llama.cpp on the same files of GGUF: reading a prompt and plain decoding, taking turns.

    python benchmarks/quantised.py FILE.gguf ... --llama /venvs/llama/bin/python [--rounds 5] [--json FILE]
    python benchmarks/quantised.py FILE.gguf ... --llama /venvs/llama/bin/python --answers 128 [--json FILE]
    python benchmarks/quantised.py FILE.gguf ... --widths [--json FILE]

`--llama` is an interpreter that has llama-cpp-python, whose llama.cpp was built on this machine. Each engine is a
process of its own, on the same threads; all read the same tokens, and write greedily. truedraft drafts nothing here, in
fp32 and in bf16. Speeds are medians over rounds, those of decoding after the first token; ratios are taken round by
round.

`--widths`: instead, milliseconds of a pass of truedraft over 1 to 32 tokens after a text of 64, in the default dtype:
the least of as many rounds, each of which takes all widths in turn.

`--answers N`: instead, answers of at most N tokens to nine requests of nine kinds, in the model's chat template, up to
its end of text: tokens per second over all of them, prompts included. llama.cpp alone and with its prompt lookup of
ten tokens, which calls its Python binding's `LlamaPromptLookupDecoding`; truedraft in its default dtype without drafts
and with the default drafter. A round takes all nine by one engine after the other; llama.cpp rounds activations to
eight bits, so that its texts are others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

THREADS = len(os.sched_getaffinity(0))
TEXT = Path(__file__).parents[1] / "LICENSE"
DTYPES = ("float32", "bfloat16")
LOOKUP = "llama.cpp, its lookup"
WIDTHS, READ = (1, 2, 4, 8, 16, 32), 64  # tokens of passes, and of the text before them
ANSWERING = {"llama.cpp": None, LOOKUP: 10, "no drafts": None, "default": "auto"}  # what each drafts by


def spoken_by_truedraft(file: str, dtype: str, draft: str | None = None, whole: bool = True) -> Any:
    """A function of a prompt and a number of tokens, which yields a count of new tokens after every pass. whole: texts
    do not stop at an end of text."""
    import torch

    import truedraft

    torch.set_num_threads(THREADS)
    model, tokenizer = truedraft.load(file, dtype=dtype)
    fast = truedraft.accelerate(model, tokenizer, draft=draft, strict=True)

    def generate(prompt: list[int], new: int) -> Iterator[int]:
        counts: list[tuple[float, int]] = []

        def on_pass(done: Any) -> None:
            counts.append((time.perf_counter(), sum(len(emitted.tokens) for emitted in done.emitted)))

        ids = torch.tensor([prompt])
        given: dict[str, Any] = dict(attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        if whole:
            given["min_new_tokens"] = new
        fast.forget()  # what earlier answers had
        fast.generate(ids, on_pass=on_pass, **given)
        return iter(counts)

    return generate


def spoken_by_llama(file: str, lookup: int | None = None, whole: bool = True) -> Any:
    """The same of llama.cpp, alone or with its prompt lookup."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    threads: dict[str, Any] = dict(n_threads=THREADS, n_threads_batch=THREADS)
    drafting = None if lookup is None else LlamaPromptLookupDecoding(num_pred_tokens=lookup)
    llama = Llama(
        file, n_ctx=2048, n_batch=512, verbose=False, logits_all=lookup is not None, draft_model=drafting, **threads
    )

    def generate(prompt: list[int], new: int) -> Iterator[tuple[float, int]]:
        llama.reset()
        for _, token in zip(range(new), llama.generate(prompt, temp=0.0), strict=False):
            yield time.perf_counter(), 1
            if token == llama.token_eos() and not whole:
                return

    return generate


def work(engine: str, file: str, answers: bool) -> None:
    """Answer requests, a line each: tokens per second of the prompt, and after the first token; or, of answers, their
    tokens and seconds."""
    drafting: Any = ANSWERING[engine] if answers else None
    if engine.startswith("llama.cpp"):
        generate = spoken_by_llama(file, drafting, not answers)
    else:
        generate = spoken_by_truedraft(file, "auto" if answers else engine, drafting, not answers)
    print(json.dumps({"ready": engine}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        stamps = list(generate(request["prompt"], request["new"]))
        if answers:
            print(json.dumps({"tokens": sum(n for _, n in stamps), "seconds": time.perf_counter() - start}), flush=True)
            continue
        (first, _), (last, _) = stamps[0], stamps[-1]
        decoded = sum(count for _, count in stamps[1:])
        print(
            json.dumps({"prompt": len(request["prompt"]) / (first - start), "plain": decoded / (last - first)}),
            flush=True,
        )


class Worker:
    """An engine that works in another process."""

    def __init__(self, python: str, engine: str, file: Path, answers: bool = False):
        command = [python, __file__, "--work", engine, str(file), *(["--answers", "1"] if answers else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        while line and not line.startswith("{"):  # a library's own words
            line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self._process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found

    def measured(self, prompt: list[int], new: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "new": new}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.communicate()


def compared(file: Path, llama: str, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    """Speeds of each engine on a file, and those of truedraft over that of llama.cpp."""
    from truedraft.loading import load_tokenizer

    ids = load_tokenizer(str(file)).encode(TEXT.read_text())[:prompt]
    engines = ["llama.cpp", *DTYPES]
    workers = {name: Worker(llama if name == "llama.cpp" else sys.executable, name, file) for name in engines}
    for worker in workers.values():
        worker.measured(ids, 4)
    turns = [{name: worker.measured(ids, new) for name, worker in workers.items()} for _ in range(rounds)]
    for worker in workers.values():
        worker.close()
    found: dict[str, Any] = {"prompt_tokens": len(ids), "new_tokens": new, "rounds": rounds}
    for what in ("plain", "prompt"):
        found[what] = {name: round(median(turn[name][what] for turn in turns), 2) for name in engines}
        found[f"{what}_ratio"] = {
            name: round(median(turn[name][what] / turn["llama.cpp"][what] for turn in turns), 3) for name in DTYPES
        }
    return found


def answered(file: Path, llama: str, new: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of each engine over nine requests, and those of the default over llama.cpp's better way."""
    from never_slower import CODE, PROMPTS
    from truedraft.loading import load_tokenizer

    tokenizer: Any = load_tokenizer(str(file))
    texts = [*PROMPTS.values(), f"Add a docstring to every method, and print the whole file:\n{CODE}"]
    asked = [[{"role": "user", "content": text}] for text in texts]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in asked]
    rates: dict[str, list[float]] = {engine: [] for engine in ANSWERING}
    for engine in ANSWERING:  # one after the other: together they would not leave each other the memory
        worker = Worker(llama if engine.startswith("llama.cpp") else sys.executable, engine, file, answers=True)
        worker.measured(prompts[0], 8)
        for _ in range(rounds):
            found = [worker.measured(prompt, new) for prompt in prompts]
            rates[engine].append(sum(one["tokens"] for one in found) / sum(one["seconds"] for one in found))
        worker.close()
    speeds = {engine: round(median(of), 2) for engine, of in rates.items()}
    best = max(speeds["llama.cpp"], speeds[LOOKUP])
    kept = {"requests": len(prompts), "new_tokens": new, "rounds": rounds}
    return kept | {"answers": speeds, "default_over_llama.cpp": round(speeds["default"] / best, 3)}


def by_width(file: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds of passes by their number of tokens."""
    import torch

    import truedraft
    from truedraft.tree import DraftTree

    torch.set_num_threads(THREADS)
    model, tokenizer = truedraft.load(str(file))
    target = truedraft.accelerate(model, tokenizer, draft=None, strict=True).target
    least = dict.fromkeys(WIDTHS, inf)
    with target.temporary_cache(1, 2 * READ):
        target.prefill([target.prompt(torch.arange(1, READ + 1))])
        target.commit([[0]])
        for _ in range(rounds):
            for width in WIDTHS:
                tree, start = DraftTree.chain(1, range(2, width + 1)), time.perf_counter()
                target.score([tree])
                least[width] = min(least[width], time.perf_counter() - start)
    kept = {"dtype": str(model.dtype).removeprefix("torch."), "rounds": rounds}
    return kept | {"widths": {str(width): round(1e3 * seconds, 3) for width, seconds in least.items()}}


def _kind(row: dict[str, Any]) -> tuple[str, ...]:
    """What a row of the results is of."""
    return row["model"], *(what for what in ("answers", "widths") if what in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--llama", default=sys.executable, help="an interpreter with llama-cpp-python")
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are read")
    parser.add_argument("--new", type=int, default=48, help="tokens that are written")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answers", type=int, default=0, help="answers of at most so many tokens instead")
    parser.add_argument("--widths", action="store_true", help="passes of truedraft by their width instead")
    parser.add_argument("--machine", default="", help="a description of this machine, for --json")
    parser.add_argument("--names", nargs="+", help="of the models of the files, for --json")
    parser.add_argument("--json", type=Path, help="rows of the same models are replaced")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, str(args.files[0]), bool(args.answers))
        return
    results: list[dict[str, Any]] = []
    for file, name in zip(args.files, args.names or [file.name for file in args.files], strict=True):
        if args.widths:
            found = by_width(file, args.rounds)
        elif args.answers:
            found = answered(file, args.llama, args.answers, args.rounds)
        else:
            found = compared(file, args.llama, args.prompt, args.new, args.rounds)
        results.append({"model": name} | found)
        print(json.dumps(results[-1], indent=1), flush=True)
    if args.json is not None:
        before = json.loads(args.json.read_text("utf-8"))["results"] if args.json.exists() else []
        new = {_kind(row) for row in results}
        results = [row for row in before if _kind(row) not in new] + results
        report = {"machine": args.machine, "threads": THREADS, "llama_cpp_python": "0.3.36", "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
