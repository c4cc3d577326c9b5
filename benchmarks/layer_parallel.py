"""Layer-parallel draft models (EasySpec): how much worse do drafts become when layers run side by side?

    python benchmarks/layer_parallel.py [--pairs TARGET DRAFT ...] [--tokens 120] [--length 7] [--json FILE]

EasySpec (Wu et al., 2025) gives the attention of all layers of a group the same input, so that several devices compute
them at once, and adds what they return, and the feed-forwards, in order. Keys and values of drafted tokens are
approximate then; those of the text are computed again, exactly (bonus calibration). Here groups of so many layers are
simulated one after the other; the first and the last layer stay alone, or are grouped as well ("all"). Counted are the
tokens per pass of greedy texts, and the groups that a drafted token waits for. Counts depend on no time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from stories import beginnings
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights"
PAIRS = [("nano", "nano-draft"), ("nano", "nano"), (str(WEIGHTS / "bitllama_3M"), str(WEIGHTS / "stories260K"))]


def grouped(layers: int, size: int, whole: bool) -> list[range]:
    """Consecutive layers in groups of a size; without `whole` the first and the last alone."""
    first, last = (0, layers) if whole or size == 1 else (1, layers - 1)
    inner = [range(at, min(at + size, last)) for at in range(first, last, size)]
    return [*([range(1)] if first else []), *inner, *([range(last, layers)] if last < layers else [])]


def step(model: Any, cache: DynamicCache, token: int, place: int, groups: Sequence[range]) -> Tensor:
    """(V,) logits behind a token at a place, with the layers of each group side by side."""
    body = model.model
    states = body.embed_tokens(torch.tensor([[token]]))
    turned = body.rotary_emb(states, torch.tensor([[place]]))
    for group in groups:
        read = states
        attended = [
            layer.self_attn(
                hidden_states=layer.input_layernorm(read), position_embeddings=turned, attention_mask=None,
                past_key_values=cache,
            )[0]
            for layer in (body.layers[at] for at in group)
        ]  # fmt: skip
        for at, found in zip(group, attended, strict=True):
            states = states + found
            states = states + body.layers[at].mlp(body.layers[at].post_attention_layernorm(states))
    return model.lm_head(body.norm(states))[0, -1]


def drafted(model: Any, text: Tensor, length: int, groups: Sequence[range]) -> list[int]:
    """A greedy chain behind a text, whose own keys and values are exact."""
    cache = DynamicCache(config=model.config)
    if text.shape[1] > 1:
        model(text[:, :-1], past_key_values=cache, use_cache=True)
    tokens = [int(text[0, -1])]
    for place in range(text.shape[1] - 1, text.shape[1] - 1 + length):
        tokens.append(int(step(model, cache, tokens[-1], place, groups).argmax()))
    return tokens[1:]


def passes_of(model: Any, text: Tensor, begun: int, tokens: int, length: int, groups: Sequence[range]) -> int:
    """Passes for so many tokens of the target's greedy text."""
    at, passes = begun, 0
    while at < begun + tokens:
        chain, right = drafted(model, text[:, :at], length, groups), text[0, at : at + length].tolist()
        at += 1 + next((i for i, token in enumerate(chain) if token != right[i]), length)
        passes += 1
    return passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=[name for pair in PAIRS for name in pair])
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--length", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    for names in zip(args.pairs[::2], args.pairs[1::2], strict=True):
        (target, tokenizer), (draft, _) = load(names[0]), load(names[1])
        layers = draft.config.num_hidden_layers
        prompts = beginnings(tokenizer, 3)
        more = args.tokens + 2 * args.length
        wholes = [target.generate(ids, max_new_tokens=more, min_new_tokens=more, do_sample=False) for ids in prompts]
        ways = {"one by one": grouped(layers, 1, False)}
        for size in (2, 4):
            ways |= {
                f"groups of {size}": grouped(layers, size, False),
                f"groups of {size}, all": grouped(layers, size, True),
            }
        for way, groups in ways.items():
            if way != "one by one" and groups == ways["one by one"]:
                continue
            passes = sum(
                passes_of(draft, text, ids.shape[1], args.tokens, args.length, groups)
                for text, ids in zip(wholes, prompts, strict=True)
            )
            rows.append({
                "target": Path(names[0]).name, "draft": Path(names[1]).name, "way": way, "layers": layers,
                "waited": len(groups), "tokens_per_pass": len(prompts) * args.tokens / passes,
            })  # fmt: skip
            print(*rows[-1].values(), flush=True)
    if args.json:
        about = {"machine": machine(), "tokens": args.tokens, "length": args.length, "torch": torch.__version__}
        write_whole(args.json, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
