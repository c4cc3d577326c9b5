"""Fuzzing of constrained answers: python tools/fuzz_answers.py [--count 2000] [--seed 0] [--out FILE]

Requests with random schemas, choices, regular expressions and grammars, many of which have texts that look like special
tokens, go to servers of models with four kinds of tokenizers: with and without drafts, with and without reasoning,
streamed and whole, with other settings that could break a constraint. Every answer that ends with `finish_reason`
"stop" must be a whole text of its constraint; every other one must be too long or refused. The exit status is 1 if
anything else was found.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import re
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

STRANGE = ["<|stop|>", "</s>", "a<s>b", "<unk>", "<think>", "</think>x", "<tool_call>\n", "a<|stop|>", "[TOOL_CALLS] ["]
PLAIN = ["yes", "no", "the day", "é🙂", "漢字", "a\nb", " lead", "tail ", '"', "\\", "{}"]
MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TEMPLATES = {
    "none": MESSAGES,
    "opened": MESSAGES + "<think>\n{# until </think> #}",
    "possible": MESSAGES + "{# <think> and </think> #}",
    "ended": MESSAGES + "<think>\n\n</think>\n\n",
}
MODELS = ("nano", "byte-level", "stories260K", "unigram")
VALUES = re.compile(r"[0-9]+|[`\"'].*[`\"']")  # of parameters, in messages
Valid = Callable[[str], bool]


def text(pick: random.Random) -> str:
    return pick.choice(STRANGE if pick.random() < 0.6 else PLAIN)


def schema(pick: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose values are short."""
    kind = pick.randrange(7 if depth < 2 else 5)
    if kind == 0:
        return {"const": text(pick)}
    if kind == 1:
        return {"enum": [text(pick), pick.randrange(100), None, True][: pick.randint(1, 4)]}
    if kind == 2:
        return {"type": "integer", "minimum": 0, "maximum": pick.randrange(1, 500)}
    if kind == 3:
        return {"type": "string", "maxLength": pick.randint(0, 4)}
    if kind == 4:
        return {"type": "boolean"}
    if kind == 5:
        return {"type": "array", "items": schema(pick, depth + 1), "maxItems": pick.randint(1, 3)}
    names = [*dict.fromkeys(text(pick) for _ in range(pick.randint(1, 2)))]
    return {
        "type": "object", "properties": {name: schema(pick, depth + 1) for name in names}, "required": names,
        "additionalProperties": False,
    }  # fmt: skip


def constraint(pick: random.Random) -> tuple[dict[str, Any], Valid]:
    """Parameters of a request, and what tells whether an answer is a whole one."""
    kind, one = pick.randrange(5), text(pick)
    if kind == 0:
        choice = [text(pick) for _ in range(pick.randint(1, 3))]
        return {"structured_outputs": {"choice": choice}}, lambda found: found in choice
    if kind == 1:
        pattern = pick.choice([re.escape(one) + "[ab]{1,3}", f"(x|{re.escape(one)})y?", "[0-9]{1,3}"])
        return {"structured_outputs": {"regex": pattern}}, lambda found: bool(re.fullmatch(pattern, found))
    if kind == 2:
        grammar, pattern = f'start: {json.dumps(one)} /[ab]{{1,2}}/ | "x"', f"{re.escape(one)}[ab]{{1,2}}|x"
        return {"structured_outputs": {"grammar": grammar}}, lambda found: bool(re.fullmatch(pattern, found))
    given = schema(pick)

    def valid(found: str) -> bool:
        import jsonschema

        try:
            jsonschema.validate(json.loads(found), given)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    if kind == 3:
        return {"structured_outputs": {"json": given}}, valid
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}, valid


def settings(pick: random.Random) -> dict[str, Any]:
    """The other parameters of a request, some of which are at odds with a constraint."""
    given: dict[str, Any] = {
        "max_tokens": pick.choice([60, 60, 60, 5]), "temperature": pick.choice([0, 1.0, 1.5]),
        "stream": pick.random() < 0.5, "seed": pick.randrange(1000),
        "draft": pick.choice(["auto", "none", "suffix", "token-recycling"]),
    }  # fmt: skip
    for name, value in (
        ("stop", pick.choice([["a"], ["<|stop|>"], ["\n"], ["zz", "}"]])), ("min_tokens", pick.choice([1, 2, 5])),
        ("stop_token_ids", pick.sample(range(250), 3)), ("n", 2), ("skip_special_tokens", False), ("logprobs", 1),
        ("repetition_penalty", 1.3), ("frequency_penalty", 0.5), ("include_stop_str_in_output", True),
        ("logit_bias", {str(pick.randrange(250)): pick.choice([-100.0, 50.0])}), ("top_k", 5), ("return_tokens", True),
        ("prediction", {"type": "content", "content": text(pick)}),
    ):  # fmt: skip
        if pick.random() < 0.12:
            given[name] = value
    return given


def request(pick: random.Random, number: int) -> tuple[str, dict[str, Any], Valid]:
    """The path and the body of a request, and what tells whether its answers are whole."""
    chats = pick.random() < 0.7
    given, valid = constraint(pick)
    body = {"model": "m", **settings(pick), **given}
    if chats:
        body["logprobs"] = bool(body.get("logprobs"))
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": f"{number} day"}]}, valid
    return "/v1/completions", {**body, "prompt": pick.choice(["one day", "the", f"{number} a"])}, valid


def answers(url: str, body: dict[str, Any]) -> list[tuple[str, str]] | str:
    """(text, finish_reason) of every choice; or why there are none."""
    sent = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        read = urllib.request.urlopen(sent, timeout=120).read().decode()
    except urllib.error.HTTPError as error:
        found = json.loads(error.read())["error"]
        return f"{error.code} {found['message']}"
    if not body["stream"]:
        choices = json.loads(read)["choices"]
        return [
            (one.get("text", (one.get("message") or {}).get("content")) or "", one["finish_reason"]) for one in choices
        ]
    texts, reasons = Counter[int](), dict[int, str]()
    parts: dict[int, list[str]] = {}
    for line in read.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line[6:])
            if "error" in event:
                refused = event["error"]["type"] == "invalid_request_error"
                return f"{400 if refused else 500} {event['error']['message']}"
            for one in event["choices"]:
                texts[one["index"]] += 1
                parts.setdefault(one["index"], []).append(
                    one.get("text", (one.get("delta") or {}).get("content")) or ""
                )
                reasons[one["index"]] = one["finish_reason"] or reasons.get(one["index"], "")
    return [("".join(parts[index]), reasons[index]) for index in sorted(parts)]


@contextlib.contextmanager
def server(kind: str, template: str) -> Iterator[str]:
    """The URL of a server of a model with a tokenizer of a kind."""
    import torch

    import truedraft
    from models import tiny
    from served import running
    from tokenizers_for_tests import SHARED, tokenizer_of
    from truedraft.loading import load

    if kind == "nano":
        model, tokenizer = load("nano")
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|stop|>"]})
        tokenizer.add_tokens(["<think>", "</think>"])
        model.resize_token_embeddings(len(tokenizer))  # type: ignore[operator]
    elif kind == "stories260K":
        model, tokenizer = load(str(SHARED / "weights" / kind))
    else:
        tokenizer = tokenizer_of(kind)
        model = copy.deepcopy(tiny("llama", torch.float32, vocabulary=len(tokenizer)))
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.config.max_position_embeddings = 4096
    fast = truedraft.accelerate(model, tokenizer, control="fixed")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "template.jinja")
        file.write_text(TEMPLATES[template], encoding="utf-8")
        drafts = ("none", "suffix", "token-recycling")
        with running(
            fast, chat_template=str(file), served_model_name="m", max_rows=8, allow_draft=drafts, max_waiting=64
        ) as made:
            yield made.url


def fuzzed(count: int, seed: int, models: tuple[str, ...] = MODELS) -> tuple[Counter[str], list[dict[str, Any]]]:
    """What became of requests, by kind; and the findings."""
    tally, findings = Counter[str](), list[dict[str, Any]]()
    places = [(kind, template) for kind in models for template in TEMPLATES]
    for place, (kind, template) in enumerate(places):
        numbers = range(place, count, len(places))
        with server(kind, template) as url, ThreadPoolExecutor(8) as pool:

            def ask(number: int, kind: str = kind, template: str = template, url: str = url) -> None:
                path, body, valid = request(random.Random(f"{seed} {number}"), number)
                found = answers(url + path, body)
                wrong = [found] if isinstance(found, str) and not found.startswith("400") else []
                if isinstance(found, str):
                    tally["refused"] += 1
                    tally["refused: " + VALUES.sub("…", found[4:])[:70]] += 1
                else:
                    tally.update(reason for _, reason in found)
                    wrong = [one for one in found if one[1] != "length" and not (one[1] == "stop" and valid(one[0]))]
                if wrong:
                    case = {"number": number, "model": kind, "template": template, "path": path}
                    findings.append({**case, "body": body, "wrong": wrong})

            list(pool.map(ask, numbers))
    return tally, findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the findings, as JSON")
    given = parser.parse_args()
    tally, findings = fuzzed(given.count, given.seed)
    for name, number in tally.most_common():
        print(f"{number:6} {name}")
    for found in findings[:10]:
        print(json.dumps(found, ensure_ascii=False))
    if given.out is not None:
        given.out.write_text(json.dumps(findings, indent=1, ensure_ascii=False), encoding="utf-8")
    print(f"{len(findings)} findings in {given.count} requests")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
