"""truedraft and llama.cpp on the same files of GGUF: reading a prompt and plain decoding, taking turns.

    python benchmarks/quantised.py FILE.gguf ... --llama /venvs/llama/bin/python [--rounds 5] [--json FILE]

`--llama` is an interpreter that has llama-cpp-python, whose llama.cpp was built on this machine. Each engine is a
process of its own, on the same threads; all read the same tokens, and write greedily. truedraft drafts nothing here, in
fp32 and in bf16. Speeds are medians over rounds, those of decoding after the first token; ratios are taken round by
round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

THREADS = len(os.sched_getaffinity(0))
TEXT = Path(__file__).parents[1] / "LICENSE"
DTYPES = ("float32", "bfloat16")


def spoken_by_truedraft(file: str, dtype: str) -> Any:
    """A function of a prompt and a number of tokens, which yields a count of new tokens after every pass."""
    import torch

    import truedraft

    torch.set_num_threads(THREADS)
    model, tokenizer = truedraft.load(file, dtype=dtype)
    fast = truedraft.accelerate(model, tokenizer, draft=None, strict=True)

    def generate(prompt: list[int], new: int) -> Iterator[int]:
        counts: list[tuple[float, int]] = []

        def on_pass(done: Any) -> None:
            counts.append((time.perf_counter(), sum(len(emitted.tokens) for emitted in done.emitted)))

        ids = torch.tensor([prompt])
        given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False)
        fast.generate(ids, on_pass=on_pass, **given)
        return iter(counts)

    return generate


def spoken_by_llama(file: str) -> Any:
    """The same of llama.cpp."""
    from llama_cpp import Llama

    llama = Llama(
        file, n_ctx=2048, n_batch=512, n_threads=THREADS, n_threads_batch=THREADS, verbose=False, logits_all=False
    )

    def generate(prompt: list[int], new: int) -> Iterator[tuple[float, int]]:
        llama.reset()
        for _, _token in zip(range(new), llama.generate(prompt, temp=0.0), strict=False):
            yield time.perf_counter(), 1

    return generate


def work(engine: str, file: str) -> None:
    """Answer requests, a line each: seconds to the first token, and tokens per second after it."""
    generate = spoken_by_llama(file) if engine == "llama.cpp" else spoken_by_truedraft(file, engine)
    print(json.dumps({"ready": engine}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        stamps = list(generate(request["prompt"], request["new"]))
        (first, _), (last, _) = stamps[0], stamps[-1]
        decoded = sum(count for _, count in stamps[1:])
        print(
            json.dumps({"prompt": len(request["prompt"]) / (first - start), "plain": decoded / (last - first)}),
            flush=True,
        )


class Worker:
    """An engine that works in another process."""

    def __init__(self, python: str, engine: str, file: Path):
        command = [python, __file__, "--work", engine, str(file)]
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
    found: dict[str, Any] = {"file": file.name, "prompt_tokens": len(ids), "new_tokens": new, "rounds": rounds}
    for what in ("plain", "prompt"):
        found[what] = {name: round(median(turn[name][what] for turn in turns), 2) for name in engines}
        found[f"{what}_ratio"] = {
            name: round(median(turn[name][what] / turn["llama.cpp"][what] for turn in turns), 3) for name in DTYPES
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--llama", default=sys.executable, help="an interpreter with llama-cpp-python")
    parser.add_argument("--prompt", type=int, default=512, help="tokens that are read")
    parser.add_argument("--new", type=int, default=48, help="tokens that are written")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default="", help="a description of this machine, for --json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, str(args.files[0]))
        return
    results = []
    for file in args.files:
        results.append(compared(file, args.llama, args.prompt, args.new, args.rounds))
        print(json.dumps(results[-1], indent=1), flush=True)
    if args.json is not None:
        report = {"machine": args.machine, "threads": THREADS, "llama_cpp_python": "0.3.36", "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
