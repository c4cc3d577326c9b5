"""The server under load: latency over the engine alone, throughput by clients, predictions, gaps, and a peer.

    python benchmarks/serve.py [PART ...] [--rounds 3] [--json FILE]

Parts: latency (engine alone against the server), clients (the default drafter against none, at 1 to 64 clients),
prediction (edits with OpenAI's `prediction`, on `nano` and stretched to 0.1 B), gap (a running stream while a prompt of
the longest context arrives), peer (`transformers serve`, same model and requests). Every part asserts that the texts of
its sides are the same. The client runs on the same machine, one process, asyncio without a library.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import truedraft
from loadclient import Answer, clients, process
from truedraft import assets
from truedraft.bench.workloads import embedded
from truedraft.files import write_whole
from truedraft.loading import load

PORT = 8190
STORIES = [item.text for work in embedded() if work.name == "story" for item in work.items]
EDITS = [item for work in embedded() if work.name in ("edit", "shorten", "chat") for item in work.items]
PROMPT = "one day, a little girl named lily"
CLIENTS = {1: 4, 4: 6, 16: 4, 64: 3}  # clients at once, and requests of each, one after the other
NAMES = ("mia", "max", "sara", "leo", "anna", "jack", "lucy", "sam", "nora", "tim", "emma", "fred", "rosa")
PLACES = ("at the zoo", "by the sea", "in the snow", "on a hill", "at school", "in the garden", "near the river")
TURNS = 4  # edits of each client
WARM_UP = 10  # requests before latencies are measured
# the default but for the memory of earlier outputs: edits are repeated, and would be copied from the last
DRAFT = "input-guided+suffix-wide:memory=1+token-recycling"


@contextmanager
def served(*options: str) -> Iterator[int]:
    """A server of `nano` in a process of its own; yields its port."""
    command = [sys.executable, "-m", "truedraft", "serve", "nano", "--port", str(PORT), "--log-level", "warning"]
    with process([*command, *options], PORT):
        yield PORT


def story(i: int, tokens: int | None = None, **more: Any) -> dict[str, Any]:
    """The i-th story; the first 364 begin differently. tokens: by default of many lengths, so that rows end apart."""
    tokens = 64 + 37 * i % 129 if tokens is None else tokens
    name, place = NAMES[i % len(NAMES)], PLACES[i % len(PLACES)]
    text = f"{STORIES[i % len(STORIES)]} {name} was {place}."
    return {"prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True} | more


def run(port: int, bodies: list[list[dict[str, Any]]]) -> tuple[list[list[Answer]], float]:
    """The answers of clients at once, and the seconds until the last."""
    start = time.perf_counter()
    answers = asyncio.run(clients(port, bodies))
    seconds = time.perf_counter() - start
    assert all(answer.status == 200 for mine in answers for answer in mine), "a request failed"
    return answers, seconds


def latency(rounds: int) -> Iterator[dict[str, Any]]:
    """Time to the first token, and per pass, of the server beside the engine alone with the same settings; no drafts,
    no kept prefixes."""
    model, tokenizer = load("nano")
    fast = truedraft.accelerate(model, tokenizer)
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    tokens = 200
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "draft": None}

    def alone(n: int) -> tuple[float, float]:
        start, steps, first = time.perf_counter(), 0, 0.0
        for _ in range(n):
            engine.add_request(ids, max_new_tokens=tokens, **settings)
        while engine.has_unfinished_requests():
            engine.step()
            steps, first = steps + 1, first or time.perf_counter() - start
        return first, (time.perf_counter() - start - first) / (tokens - 1)

    with fast.engine(16, 2048) as engine, served("--prefix-bytes", "0") as port:
        for _ in range(WARM_UP):
            alone(1)
        body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        run(port, [[body | {"draft": "none"}] * WARM_UP])
        for n in list(CLIENTS)[:3]:
            sides: dict[str, list[tuple[float, float]]] = {"engine": [], "server": []}
            for _ in range(rounds + 1):
                sides["engine"].append(alone(n))
                answers, _ = run(port, [[body | {"draft": "none"}]] * n)
                each = [mine[0] for mine in answers]
                per_pass = median((a.arrivals[-1] - a.first) / (tokens - 1) for a in each)
                sides["server"].append((median(a.first for a in each), per_pass))
            figures = {
                f"{side}_{name}_ms": round(1e3 * median(pair[i] for pair in pairs[1:]), 3)
                for side, pairs in sides.items()
                for i, name in enumerate(("first", "pass"))
            }
            added = {
                f"added_{name}_ms": round(
                    1e3 * median(s[i] - e[i] for e, s in zip(sides["engine"][1:], sides["server"][1:], strict=True)), 3
                )
                for i, name in enumerate(("first", "pass"))
            }
            yield {"streams": n} | figures | added


def throughput(port: int, bodies: Callable[[str, int], list[list[dict[str, Any]]]], rounds: int) -> dict[str, Any]:
    """Tokens per second with the default drafter and without drafts, in alternating rounds; texts are compared.
    Counted while all clients are busy: until the first has no more to ask.

    bodies: (draft, round) -> the requests of each client.
    """
    speeds: dict[str, list[float]] = {DRAFT: [], "none": []}
    texts: dict[str, list[list[str]]] = {}
    lengths = []
    for i in range(rounds + 1):
        for draft, found in speeds.items():
            answers, _ = run(port, bodies(draft, i))
            each = [answer for mine in answers for answer in mine]
            start, end = min(a.sent for a in each), min(mine[-1].sent + mine[-1].seconds for mine in answers)
            texts[draft] = [[answer.text for answer in mine] for mine in answers]
            if i:
                found.append(sum(_emitted(a, end - a.sent) for a in each) / (end - start))
                lengths += [a.last["truedraft"]["mean_acceptance_length"] for a in each if draft == DRAFT]
        assert texts[DRAFT] == texts["none"], "drafting changed a text"
    ratios = [a / b for a, b in zip(speeds[DRAFT], speeds["none"], strict=True)]
    return {
        "tokens_per_second": round(median(speeds[DRAFT]), 1),
        "without_drafts": round(median(speeds["none"]), 1),
        "ratio": round(median(ratios), 3),
        "mean_acceptance_length": round(median(lengths), 2),
    }


def _emitted(answer: Answer, seconds: float) -> float:
    """Tokens that an answer had after so many seconds."""
    tokens: int = answer.last["truedraft"]["tokens"]
    return tokens * sum(arrival <= seconds for arrival in answer.arrivals) / len(answer.arrivals)


def by_clients(rounds: int) -> Iterator[dict[str, Any]]:
    """Stories, each of them new, and conversations that change an earlier text, at 1 to 64 clients."""
    with served("--max-rows", "64", "--draft", DRAFT, "--prefix-bytes", "0") as port:
        for kind in ("story", "edit"):
            for n, turns in CLIENTS.items():

                def bodies(draft: str, i: int, n: int = n, turns: int = turns, kind: str = kind) -> list[list[Any]]:
                    asked = [[(i * turns + turn) * n + client for turn in range(turns)] for client in range(n)]
                    if kind == "story":
                        return [[story(k, draft=draft) for k in mine] for mine in asked]
                    return [[edit(k, draft, predicted=False) for k in mine] for mine in asked]

                yield {"text": kind, "clients": n} | throughput(port, bodies, rounds)


def edit(i: int, draft: str, predicted: bool = True) -> dict[str, Any]:
    item = EDITS[i % len(EDITS)]
    body: dict[str, Any] = {"prompt": item.text, "max_tokens": 300, "temperature": 0, "stream": True, "draft": draft}
    if predicted and draft != "none":
        body["prediction"] = {"type": "content", "content": item.references[-1]}
    return body


def predictions(rounds: int) -> Iterator[dict[str, Any]]:
    """Edits whose prediction is the text before the edit, several of each client, one after the other."""
    for size in ("nano", "0.1B"):
        options = [] if size == "nano" else ["--stretched", size]
        with served(*options, "--prefix-bytes", "0", "--draft", DRAFT) as port:
            for n in (1, 8):

                def bodies(draft: str, i: int, n: int = n) -> list[list[Any]]:
                    return [[edit(turn * n + client, draft) for turn in range(TURNS)] for client in range(n)]

                yield {"model": size, "clients": n} | throughput(port, bodies, rounds)


def gap(rounds: int) -> Iterator[dict[str, Any]]:
    """The longest gap between two events of running streams while a prompt of the longest context arrives."""
    for size in ("nano", "0.1B"):
        options = [] if size == "nano" else ["--stretched", size]
        with served(*options, "--prefix-bytes", "0", "--stream-interval", "0") as port:
            long = {"prompt": [3002] * 1990, "max_tokens": 8, "temperature": 0, "stream": True}

            async def scenario(port: int = port, long: dict[str, Any] = long) -> tuple[float, float, float]:
                running = asyncio.gather(*(clients(port, [[story(i, 400, draft="none")]]) for i in range(4)))
                await asyncio.sleep(0.4)
                late = (await clients(port, [[long]]))[0][0]
                answers = [mine[0][0] for mine in await running]
                gaps = [b - a for one in answers for a, b in zip(one.arrivals, one.arrivals[1:], strict=False)]
                return max(gaps), median(gaps), late.first

            runs = [asyncio.run(scenario()) for _ in range(rounds)]
            yield {
                "model": size, "streams": 4, "prompt_tokens": 1990,
                "longest_gap_ms": round(1e3 * median(r[0] for r in runs), 1),
                "usual_gap_ms": round(1e3 * median(r[1] for r in runs), 2),
                "first_token_of_the_prompt_ms": round(1e3 * median(r[2] for r in runs), 1),
            }  # fmt: skip


def peer(rounds: int) -> Iterator[dict[str, Any]]:
    """`transformers serve`, with and without its continuous batching, on the same requests."""
    sides: dict[str, tuple[list[str], str]] = {
        "truedraft": (
            [sys.executable, "-m", "truedraft", "serve", "nano", "--log-level", "warning", "--draft", DRAFT],
            "nano",
        )
    }
    executable, folder = str(Path(sys.executable).with_name("transformers")), str(assets.path("nano"))
    sides["transformers"] = ([executable, "serve", folder, "--dtype", "float32"], folder)
    sides["transformers, continuous batching"] = (
        [executable, "serve", folder, "--dtype", "float32", "--continuous-batching"],
        folder,
    )
    texts: dict[tuple[str, int], list[list[str]]] = {}
    for name, (command, model) in sides.items():
        with process([*command, "--port", str(PORT)], PORT):
            for n in (1, 4, 16):
                bodies = [
                    [
                        {"model": model, "prompt": STORIES[(i + k) % 4], "max_tokens": 64, "temperature": 0}
                        for k in range(2)
                    ]
                    for i in range(n)
                ]
                speeds = []
                for _ in range(rounds + 1):
                    answers, seconds = run(PORT, bodies)
                    tokens = sum(a.last["usage"]["completion_tokens"] for mine in answers for a in mine)
                    speeds.append(tokens / seconds)
                    texts[name, n] = [[a.text.strip() for a in mine] for mine in answers]
                same = texts[name, n] == texts["truedraft", n]
                speed = round(median(speeds[1:]), 1)
                yield {"server": name, "clients": n, "tokens_per_second": speed, "same_texts": same}


PARTS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "latency": latency, "clients": by_clients, "prediction": predictions, "gap": gap, "peer": peer,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kept = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    kept["machine"] = f"{platform.machine()}, {torch.get_num_threads()} threads"
    for part in args.parts or PARTS:
        kept[part], kept["rounds"] = [], kept.get("rounds", {}) | {part: args.rounds}
        for line in PARTS[part](args.rounds):
            print(part, line, flush=True)
            kept[part].append(line)
        if args.json is not None:
            write_whole(args.json, json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
