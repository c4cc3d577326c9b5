"""Random requests to the server's API, and the texts that `generate` has for the same settings, written out by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from truedraft.accelerated import Accelerated

PROMPTS = (
    "one day, a little girl named lily",
    "tom and his mother went to the park. they saw a",
    "once upon a time there was a big red ball",
    "the little bird said",
    "a",
)
STOPS = (["."], [" she", "park"], ["the big", ","], [" and"], ["zzz"])


class Penalties(LogitsProcessor):
    """OpenAI's penalties by their definition, one token at a time."""

    def __init__(self, frequency: float, presence: float, prompt: int):
        self.frequency, self.presence, self.prompt = frequency, presence, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            output = ids[self.prompt :]
            for token in set(output):
                scores[row, token] -= self.frequency * output.count(token) + self.presence
        return scores


@dataclass
class Expected:
    """What the choices of a response must be: their tokens, texts and reasons to end."""

    tokens: list[list[int]]
    texts: list[str]
    reasons: list[str]


def random_body(chooser: random.Random, chat: bool = False) -> dict[str, Any]:
    """A request with random settings; its seed is always given."""
    prompt = chooser.choice(PROMPTS)
    body: dict[str, Any] = {"model": "nano", "seed": chooser.randrange(2**40), "return_tokens": True}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    body["max_tokens"] = chooser.choice((1, 5, 17, 40))
    body["temperature"] = chooser.choice((0, 0, 0.7, 1.0, 1.4))
    options: dict[str, tuple[Any, ...]] = {
        "top_p": (0.5, 0.9, 1.0),
        "top_k": (1, 5, 50, -1),
        "min_p": (0.05, 0.2),
        "repetition_penalty": (1.1, 1.3),
        "frequency_penalty": (0.5, 1.5, -0.5),
        "presence_penalty": (0.4, 2.0),
        "logit_bias": ({"3002": 5.0, "16": -100.0}, {"2908": 3.5}),
        "stop": STOPS,
        "stop_token_ids": ([16], [2898, 2908]),
        "bad_words": (["park"], [" the", "and", "lily"], ["a big", "to the", "."]),
        "min_tokens": (1,),
        "ignore_eos": (True,),
        "n": (1, 2, 3),
        "draft": ("none",),
        "prediction": tuple({"type": "content", "content": text} for text in PROMPTS),
        "references": (["a big tree", {"type": "text", "text": "she wanted to climb it."}],),
    }
    for name, values in options.items():
        if chooser.random() < 0.25:
            body[name] = chooser.choice(values)
    if body.get("draft") == "none":
        body.pop("prediction", None)
        body.pop("references", None)
    if "stop" in body:  # one of `generate` ends a text before min_new_tokens too; `test_serve_stops.py` has both
        body.pop("min_tokens", None)
    if "." in body.get("bad_words", ()) and 16 in body.get("stop_token_ids", ()):
        body.pop("stop_token_ids")  # `generate` lets an end pass that is a bad word; `test_serve_peers.py` has both
    return body


def expected(plain: Accelerated, body: dict[str, Any]) -> Expected:
    """The choices of the response to a body of `random_body`, by `generate` without drafts."""
    tokenizer: Any = plain.tokenizer
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    ids = torch.tensor([tokenizer(prompt).input_ids])
    length, end = ids.shape[1], plain.model.generation_config.eos_token_id
    ends = [] if body.get("ignore_eos") else [end]
    ends += body.get("stop_token_ids", [])
    settings: dict[str, Any] = {
        "max_new_tokens": body["max_tokens"], "eos_token_id": ends or None, "pad_token_id": 0,
        "repetition_penalty": body.get("repetition_penalty"), "min_new_tokens": body.get("min_tokens"),
        "stop_strings": body.get("stop"), "num_return_sequences": body.get("n", 1),
        "attention_mask": torch.ones_like(ids),
    }  # fmt: skip
    if "logit_bias" in body:
        settings["sequence_bias"] = {(int(token),): bias for token, bias in body["logit_bias"].items()}
    if "bad_words" in body:
        ways = [way for word in body["bad_words"] for way in (word.lstrip(), " " + word.lstrip())]
        settings["bad_words_ids"] = [tokenizer(way, add_special_tokens=False).input_ids for way in ways]
    if body.get("frequency_penalty") or body.get("presence_penalty"):
        penalties = Penalties(body.get("frequency_penalty", 0), body.get("presence_penalty", 0), length)
        settings["logits_processor"] = LogitsProcessorList([penalties])
    if body["temperature"] > 0:
        settings |= {"do_sample": True, "temperature": body["temperature"], "top_p": body.get("top_p", 1.0)}
        settings |= {"top_k": max(body.get("top_k", 0), 0), "min_p": body.get("min_p"), "seed": body["seed"]}
        rows = plain.generate(ids, **settings)
    else:
        settings["num_return_sequences"] = 1
        row = plain.model.generate(ids, do_sample=False, tokenizer=tokenizer, **settings)  # type: ignore[operator]
        rows = row.expand(body.get("n", 1), -1)
    found = Expected([], [], [])
    for row in rows[:, length:].tolist():
        tokens = _until_end(row, set(ends), body["max_tokens"], body.get("stop"), tokenizer, ids[0].tolist())
        text = _text(tokenizer, ids[0].tolist(), tokens, set(ends))
        at = min((text.find(stop) for stop in body.get("stop", ()) if stop in text), default=None)
        stopped = tokens and tokens[-1] in ends
        found.tokens.append(tokens)
        found.texts.append(text if at is None else text[:at])
        found.reasons.append("stop" if stopped or at is not None else "length")
    return found


def _until_end(
    row: list[int], ends: set[int], most: int, stops: list[str] | None, tokenizer: Any, prompt: list[int]
) -> list[int]:
    """A row without the padding after its end."""
    for n in range(1, len(row) + 1):
        text = tokenizer.decode(prompt + row[:n])[len(tokenizer.decode(prompt)) :]
        if row[n - 1] in ends or n == most or any(stop in text for stop in stops or ()):
            return row[:n]
    return row


def _text(tokenizer: Any, prompt: list[int], tokens: list[int], ends: set[int]) -> str:
    """The text of the output as the continuation of its prompt, without special tokens and without what ended it."""
    shown = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    whole = tokenizer.decode(prompt + shown, skip_special_tokens=True)
    return str(whole[len(tokenizer.decode(prompt, skip_special_tokens=True)) :])
