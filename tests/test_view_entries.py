"""Views over a part of the KV cache: passes equal those of the model over exactly these entries, picked one by one."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

import truedraft
from drafters_for_tests import skipping
from models import V, ragged, tiny
from nets import RULES, generated
from test_runtime import random_tree, words
from test_views import COMPILED, LAYERS, RUNTIMES, begun, check_unaffected, cut, deep, error, target_of
from truedraft import DraftTree, Refused
from truedraft.errors import NoRoom
from truedraft.runtime.compiled import CompiledPass
from truedraft.targets import drafting
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Prompt
from truedraft.views._base import View
from truedraft.views._together import Together
from truedraft.views.window_kv import WindowKv

SINKS, RECENT = 2, 6
VIEW = WindowKv(SINKS, RECENT)
LENGTHS = (31, 3, 9, 12)  # of prompts: beyond the window, within it, as long with the pending token, just beyond
# rotary embeddings, tables of positions, latents, shared keys, scaled queries, sinks, a mixture of experts
EVERY = ["llama", "qwen3", "gpt2", "opt", "gpt_neox", "mixtral", "deepseek_v3", "gemma4_text", "ministral3", "biogpt"]
WINDOWS = ["mistral", "gemma2", "gpt_oss"]  # with windows, which are as long as `RECENT` or longer


def unwindowed(model: PreTrainedModel) -> Any:
    """A copy whose windows are longer than any text."""
    made: Any = copy.deepcopy(model)
    for part in [made.config, *(module for module in made.modules())]:
        if isinstance(getattr(part, "sliding_window", None), int):
            part.sliding_window = 10_000
    return made


class Picked:
    """A model over entries of a text's keys and values, picked by their positions.

    text: whose entries are those of the whole model; the last token is not read yet.
    """

    def __init__(self, model: Any, skipped: Sequence[int] = ()):
        self.whole, self.model, self.skipped = model, unwindowed(cut(model, skipped) if skipped else model), skipped

    def logits(self, text: Sequence[int], tokens: Sequence[int], sinks: int = SINKS, recent: int = RECENT) -> Tensor:
        """(n, V) logits at tokens that follow the text."""
        positions = [p for p in range(len(text)) if p < sinks or p >= len(text) - recent]
        read = DynamicCache()
        if text:
            self.whole(torch.tensor([list(text)]), past_key_values=read, use_cache=True)
        picked = DynamicCache()
        kept = [layer for i, layer in enumerate(read.layers) if i not in self.skipped]
        for i, layer in enumerate(kept if text else []):
            picked.update(layer.keys[:, :, positions], layer.values[:, :, positions], i)
        at = torch.arange(len(text), len(text) + len(tokens))[None]
        mask = torch.ones(1, len(positions) + len(tokens), dtype=torch.long)
        ids = torch.tensor([list(tokens)])
        return self.model(ids, attention_mask=mask, position_ids=at, past_key_values=picked, use_cache=True).logits[0]


@torch.no_grad()
def check_against_picked(target: DecoderTarget, view: View, tolerance: float, skipped: Sequence[int] = ()) -> None:
    """Trees, and chains behind scratch, after commits that fill the ring several times; rows leave and enter."""
    rng, picked = random.Random(4), Picked(target.model, skipped)
    texts = [words(rng, n) for n in LENGTHS]
    begun(target, texts, capacity=96)
    for step in range(7):
        behind = [list[int]() for _ in texts]
        for sizes in ((5, 9, 1, 3), (1, 2, 7, 1), (1, 1, 1, 1)):
            trees = [
                random_tree(rng, text[-1] if not more else 3, n)
                for text, more, n in zip(texts, behind, sizes, strict=False)
            ]
            scores = target.score(trees, view).logits
            for row, tree in enumerate(trees):
                path = tree.path(len(tree) - 1)
                plain = picked.logits(texts[row][:-1], behind[row] + [tree.tokens[i] for i in path])[-1]
                assert error(scores[row, len(tree) - 1], plain) < tolerance, (step, sizes, row)
            paths = [tree.path(len(tree) - 1) for tree in trees]
            target.advance(view, paths)
            for more, tree, path in zip(behind, trees, paths, strict=True):
                more += [tree.tokens[i] for i in path]
        trees = [random_tree(rng, text[-1], 4) for text in texts]
        target.score(trees)
        paths = [tree.path(len(tree) - 1 - step % 2) for tree in trees]
        target.commit(paths)
        for text, tree, path in zip(texts, trees, paths, strict=True):
            text += [*(tree.tokens[i] for i in path[1:]), 5]
        if step in (2, 4):
            target.release(step // 2 - 1)
            texts[step // 2 - 1] = texts[-1]
            texts.pop()
        if step == 3:
            texts.append(words(rng, 20))
            target.prefill([Prompt(torch.tensor(texts[-1]))])
    target.cache = None


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_logits_are_those_of_the_picked_entries(runtime: str) -> None:
    check_against_picked(target_of(deep("llama", torch.float32), runtime), VIEW, 1e-3)


@pytest.mark.parametrize("runtime", RUNTIMES[:2])
@pytest.mark.parametrize("architecture", [*EVERY[1:], *WINDOWS])
def test_of_every_kind_of_positions(architecture: str, runtime: str) -> None:
    check_against_picked(target_of(tiny(architecture, torch.float32), runtime), VIEW, 1e-3)


@COMPILED
def test_in_bf16() -> None:
    check_against_picked(target_of(deep("llama", torch.bfloat16), "auto"), VIEW, 0.25)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_with_layers_skipped(runtime: str) -> None:
    view = Together((skipping((0, 2)), VIEW))
    check_against_picked(target_of(deep("llama", torch.float32), runtime), view, 1e-3, (0, 2))
    with pytest.raises(Refused, match=r"two views choose .* \(2 first and 6 recent positions; 1 first"):
        target_of(deep("llama", torch.float32), runtime).check_view(Together((VIEW, WindowKv(1, 3))))
