"""Exactness of diffusion models: random prompts under random settings, each text against step-by-step decoding.

    python benchmarks/canvas_exact.py [--cases 10000] [--seed 0] [--json FILE]

Models: `nano-diffusion`, and random Llamas and Qwen 3s with either attention and shifted logits or not. A case is a
batch of prompts of different lengths with a block length, a policy, one or several positions per step, greedy or
sampled under a seed, with an end or without; every speculator decodes it under both controls. The oracle is
`canvas/reference.py` over the model's own forward, one text at a time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import truedraft
from truedraft import registry
from truedraft.canvas.layout import Layout, layout_of
from truedraft.canvas.reference import step_by_step
from truedraft.canvas.settings import settings_of, with_tokens
from truedraft.canvas.targets import plain_logits
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

VOCABULARY, MASK, END = 96, 95, 5
MODELS = 12  # random ones
KINDS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def random_model(pick: random.Random) -> tuple[str, Any, Layout]:
    """A model of two layers with large weights, so that its predictions are far apart, and a layout."""
    kind = pick.choice(list(KINDS))
    torch.manual_seed(pick.randrange(2**31))
    config = KINDS[kind](
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=END, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim == 2 else 1)
    layout = Layout(MASK, pick.choice(["blocks", "whole"]), pick.choice([1, 3, 4, 8]), pick.random() < 0.5)
    return f"{kind} {layout.attention}{' shifted' * layout.shifted}", model, layout


def inputs_of(
    pick: random.Random, layout: Layout, vocabulary: int
) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Prompts, and the same padded at the left with their mask."""
    tokens = [token for token in range(1, vocabulary) if token not in (layout.mask, END)]
    lengths = [pick.randrange(1, 24) for _ in range(pick.choice([1, 1, 2, 3]))]
    prompts = [pick.choices(tokens, k=length) for length in lengths]
    longest = max(lengths)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return prompts, ids, mask


def settings(pick: random.Random, layout: Layout) -> dict[str, Any]:
    """Arguments of `generate`."""
    block = pick.choice([layout.block, 1, 2, 4, 8]) if layout.mask == MASK else pick.choice([4, 8, 16])
    new = pick.randrange(1, 30)
    given: dict[str, Any] = {"max_new_tokens": new, "block_length": block}
    if pick.random() < 0.2:
        count = pick.choice([2, 4])
        if block % count == 0:
            given |= {"max_new_tokens": 3 * block, "steps": 3 * block // count}
    if pick.random() < 0.4:
        given |= {"do_sample": True, "seed": pick.randrange(2**32), "temperature": pick.choice([0.5, 1.0, 1.5])}
        if pick.random() < 0.5:
            given |= {"top_k": pick.choice([2, 5, 20])}
        if pick.random() < 0.3:
            given |= {"top_p": 0.9}
    if pick.random() < 0.3:
        given["eos_token_id"] = None
    return given


def compared(model: Any, layout: Layout, sides: Sequence[Any], pick: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Texts of all sides that were compared, and those that differ."""
    prompts, ids, mask = inputs_of(pick, layout, model.config.vocab_size)
    given = settings(pick, layout)
    call = settings_of(model, layout, ids.shape[1], given)
    policy = with_tokens(sides[0].policy, call.tokens)

    def scorer(text: Sequence[int], of_call: Layout) -> torch.Tensor:
        return plain_logits(model, [text], of_call)[0].float()

    decode = partial(step_by_step, scorer, call.layout, policy=policy, chooser=call.chooser, ends=call.ends)
    expected = [decode(prompt=prompt, new=call.new, index=i).text for i, prompt in enumerate(prompts)]
    found = []
    for side in sides:
        rows: list[Any] = []
        side.generate(ids, attention_mask=mask, on_canvas=lambda now: rows.extend(now[len(rows) :]), **given)
        for i, (text, row) in enumerate(zip(expected, rows, strict=True)):
            if row.text != text:
                found.append({"side": repr(side), "given": given, "prompts": prompts, "row": i, "text": row.text,
                              "expected": text})  # fmt: skip
    return len(sides) * len(prompts), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="texts to compare")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pick = random.Random(args.seed)
    nano = load("nano-diffusion")[0]
    declared = layout_of(nano.config)
    assert declared is not None
    hosts = [("nano-diffusion blocks", nano, declared)]
    hosts += [("nano-diffusion whole", nano, Layout(declared.mask, "whole", 16, True))]
    hosts += [random_model(pick) for _ in range(MODELS)]
    drafts = [(draft, control) for draft in registry.names("canvas.speculators") for control in ("fixed", "cost")]
    sides = {
        (place, rule): [
            truedraft.accelerate(model, draft=draft, rule=rule, control=control, layout=layout)
            for draft, control in drafts
        ]
        for place, (_, model, layout) in enumerate(hosts)
        for rule in registry.names("canvas.policies")
    }
    counts: Counter[str] = Counter()
    differing: list[dict[str, Any]] = []
    started = time.perf_counter()
    while counts.total() < args.cases:
        (place, rule), accelerated = pick.choice(list(sides.items()))
        name, model, layout = hosts[place]
        count, found = compared(model, layout, accelerated, pick)
        before, _ = counts.total() // 500, counts.update({f"{name}, {rule}": count})
        differing += [{"model": name, "rule": rule, **one} for one in found]
        if counts.total() // 500 > before:
            print(
                f"{counts.total():,} texts, {len(differing)} differ, {time.perf_counter() - started:.0f} s", flush=True
            )
    print(json.dumps(differing[:5], indent=1))
    if args.json:
        result = {"machine": machine(), "seed": args.seed, "texts": counts.total(), "differing": len(differing),
                  "by": dict(sorted(counts.items()))}  # fmt: skip
        write_whole(args.json, json.dumps(result, indent=1) + "\n")
    assert not differing, f"{len(differing)} texts differ"


if __name__ == "__main__":
    main()
