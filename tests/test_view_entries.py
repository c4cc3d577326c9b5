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
from models import ragged, tiny
from nets import RULES, generated
from test_runtime import random_tree, words
from test_seq2seq import sources
from test_seq2seq import tiny as seq2seq
from test_views import COMPILED, LAYERS, RUNTIMES, begun, check_unaffected, cut, deep, error, target_of
from truedraft import DraftTree, Refused
from truedraft.bench.workloads import embedded
from truedraft.errors import NoRoom
from truedraft.loading import load
from truedraft.targets import drafting
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Piece, Prompt, Taps
from truedraft.views._base import View
from truedraft.views._together import Together
from truedraft.views.top_kv import TopKv
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


@pytest.mark.covering(1)
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
    with pytest.raises(Refused, match=r"two views say .* \(2 first and 6 recent positions; 1 first"):
        target_of(deep("llama", torch.float32), runtime).check_view(Together((VIEW, WindowKv(1, 3))))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_whole_model_is_not_affected(runtime: str) -> None:
    check_unaffected(deep("llama", torch.float32), runtime, WindowKv(1, 4))


@COMPILED
@torch.no_grad()
def test_more_scratch_than_there_was_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows keep their entries and their scratch; positions beyond those reserved are refused as without a view."""
    monkeypatch.setattr(drafting, "SCRATCH", 2)
    model, rng = deep("llama", torch.float32), random.Random(3)
    text, chain = words(rng, 20), words(rng, 24)
    target = begun(target_of(model, "auto"), [text, [5]], capacity=44)
    for first in range(0, 24, 4):
        scores = target.score([DraftTree.chain(chain[first], chain[first + 1 : first + 4])], VIEW, [0]).logits[0]
        plain = Picked(model).logits(text[:-1], chain[: first + 4])[first:]
        assert error(scores, plain) < 1e-3
        target.advance(VIEW, [range(4)], [0])
    with pytest.raises(Refused, match="scratch of window-kv needs 45 positions of a row, the cache has 44"):
        target.score([DraftTree.chain(4, [5])], VIEW, [0])
    target.rewind()
    assert target.cache is not None and target.cache.lengths == [19, 0]


@pytest.mark.parametrize("runtime", RUNTIMES)
@torch.no_grad()
def test_a_row_that_was_shortened_is_followed_anew(runtime: str) -> None:
    model, rng = deep("llama", torch.float32), random.Random(5)
    text = words(rng, 20)
    target = begun(target_of(model, runtime), [[7, 8], text])
    tree = DraftTree.chain(4, [5, 6])
    target.score([tree], VIEW, [1])
    target.crop(1, 15)
    assert error(target.score([tree], VIEW, [1]).logits[0, 2], Picked(model).logits(text[:15], [4, 5, 6])[2]) < 1e-3
    target.release(0)
    target.crop(0, 5)
    assert error(target.score([tree], VIEW).logits[0, 2], Picked(model).logits(text[:5], [4, 5, 6])[2]) < 1e-3


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_scratch_is_in_one_cache_at_a_time(runtime: str) -> None:
    target = begun(target_of(deep("llama", torch.float32), runtime), [[5, 6, 7, 8]])
    views = [VIEW, skipping((1,)), WindowKv(1, 1)]
    for view in views:
        target.score([DraftTree.chain(8)], view)
        target.advance(view, [[0]])
        for other in views:
            if other != view:
                with pytest.raises(Refused, match="reads other entries than what has written the scratch: rewind"):
                    target.score([DraftTree.chain(3)], other)
        target.score([DraftTree.chain(3)], view)
        target.rewind()


def test_entries_that_do_not_fit_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = begun(DecoderTarget(deep("llama", torch.float32)), [[5, 6, 7]], capacity=256)
    monkeypatch.setattr("truedraft.targets.memory.free_memory", lambda _: 10_000)
    with pytest.raises(NoRoom, match=r"1 rows x 72 positions needs .* draft by fewer than the 2 first and 6 recent"):
        target.score([DraftTree.chain(7)], VIEW)


@COMPILED
@torch.no_grad()
def test_rows_are_read_in_pieces_beside_others() -> None:
    """And moved to other slots when they are put into use."""
    model, rng = deep("llama", torch.float32), random.Random(5)
    texts = [words(rng, n) for n in (20, 14, 17)]
    target = target_of(model, "auto")
    target.reserve(3, 64)
    for text in texts:
        target.read_pieces([Piece(Prompt(torch.tensor(text)), target.open(), 0, len(text))], Taps())
    for _ in texts:
        target.activate(2)  # the last; the row that was read in its new slot moves there, and is the next
        target.score([DraftTree.chain(3)] * len(target.cache.lengths), VIEW)  # type: ignore[union-attr]
    scores = target.score([DraftTree.chain(text[-1]) for text in (texts[2], texts[0], texts[1])], VIEW).logits
    for row, i in enumerate((2, 0, 1)):
        assert error(scores[row, 0], Picked(model).logits(texts[i][:-1], texts[i][-1:])[0]) < 1e-3


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "own forward"])
@pytest.mark.parametrize("rule", RULES)
def test_a_text_drafted_over_a_part_of_the_cache_is_that_of_model_generate(rule: str, dtype: torch.dtype) -> None:
    """Rows within the window and beyond it; the drafts are right often enough to be accepted."""
    model = tiny("llama", dtype, sharpen=1.5, layers=LAYERS)
    inputs = ragged(model, 4)
    settings = dict(max_new_tokens=30, eos_token_id=[11, 12], pad_token_id=0, **{"do_sample": False, **RULES[rule]})
    plain = generated(model, inputs, **settings)
    for draft in ("window-kv:sinks=1,recent=7", "window-kv:recent=9+skip-layers:layers=1"):
        fast = truedraft.accelerate(model, draft=draft, control="fixed")
        torch.manual_seed(5)
        assert torch.equal(fast.generate(**inputs, **settings), plain.text)
        assert torch.equal(torch.get_rng_state(), plain.state)
        assert fast.report().acceptance_rate > 0.05, "nothing that was drafted was accepted"


@COMPILED
def test_beyond_the_window_drafts_are_those_of_the_whole_model_where_it_holds_all() -> None:
    """With one of all positions, drafts are all accepted."""
    model = tiny("llama", torch.float32, layers=LAYERS)
    fast = truedraft.accelerate(model, draft="window-kv:recent=100,depth=3,nodes=3,top_k=1", control="fixed")
    fast.generate(**ragged(model, 3), max_new_tokens=31, do_sample=False)
    assert fast.report().acceptance_rate == 1.0


@torch.no_grad()
@pytest.mark.parametrize("runtime", RUNTIMES[:2])
@pytest.mark.parametrize("architecture", WINDOWS)
def test_no_more_is_read_than_the_narrowest_window(architecture: str, runtime: str) -> None:
    model: Any = tiny(architecture, torch.float32)
    text = words(random.Random(5), 30)
    target = begun(target_of(model, runtime), [text])
    scores = target.score([DraftTree.chain(text[-1], [3])], WindowKv(2, 20)).logits[0]
    plain = Picked(model).logits(text[:-1], [text[-1], 3], 2, model.config.sliding_window)
    assert model.config.sliding_window == 9 and error(scores, plain) < 1e-3


@pytest.mark.parametrize("runtime", RUNTIMES[:2])
@pytest.mark.parametrize("architecture", ["bloom", "mpt", "falcon_alibi", "llama4_text"])
def test_models_whose_attention_depends_on_places_are_refused(architecture: str, runtime: str) -> None:
    with pytest.raises(Refused, match=r"cannot read a part of its KV cache: its attention depends on the places"):
        target_of(tiny(architecture, torch.float32), runtime).check_view(VIEW)


TOP, CHUNK = 6, 2


class Attended(Picked):
    """The same over entries picked by layer and head, by the attention weights that the whole model returns."""

    def logits_of(self, text: Sequence[int], tokens: Sequence[int], chosen_at: int, chunk: int) -> Tensor:
        """(n, V) logits at tokens from the last of the text on. chosen_at: how many were read when the entries were
        chosen, by the attention of the next one."""
        weights = eager(self.whole)(torch.tensor([text[: chosen_at + 1]]), output_attentions=True).attentions
        text, read = text[:-1], DynamicCache()
        self.whole(torch.tensor([list(text)]), past_key_values=read, use_cache=True)
        before, last = chosen_at - RECENT, len(text) - RECENT
        picked = DynamicCache()
        for i, layer in enumerate(read.layers):
            heads = layer.keys.shape[1]
            # logarithms of weights are products with keys, but for a constant; the mean key has the mean product
            scores = weights[i][0, :, -1, : before // chunk * chunk].log().unflatten(-1, (-1, chunk)).mean(-1)
            chunks = scores.softmax(-1).unflatten(0, (heads, -1)).sum(1)
            keys, values = [], []
            for head in range(heads):
                best = {0, *chunks[head, 1:].topk(TOP // chunk - 1).indices.add(1).tolist()}
                at = [p for p in range(len(text)) if (p // chunk in best and p < before) or p >= last]
                keys.append(layer.keys[:, head, at])
                values.append(layer.values[:, head, at])
            picked.update(torch.stack(keys, 1), torch.stack(values, 1), i)
        at = torch.arange(len(text), len(text) + len(tokens))[None]
        mask = torch.ones(1, TOP + RECENT + len(tokens), dtype=torch.long)
        ids = torch.tensor([list(tokens)])
        return self.model(ids, attention_mask=mask, position_ids=at, past_key_values=picked, use_cache=True).logits[0]


def eager(model: PreTrainedModel) -> Any:
    made: Any = copy.deepcopy(model)
    made.set_attn_implementation("eager")
    return made


@pytest.mark.covering(1)
@torch.no_grad()
@pytest.mark.parametrize(("chunk", "refresh"), [(1, 0), (CHUNK, 0), (1, 5), (CHUNK, 2)])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_entries_with_the_most_attention(runtime: str, chunk: int, refresh: int) -> None:
    """Chosen once there are more than places, and anew after `refresh` tokens; new ones are in the ring. A row that all
    places have room for is read whole. One leaves, and another moves into its slot."""
    model = tiny("qwen3", torch.float32, sharpen=1.0, layers=LAYERS)
    rng, view = random.Random(7), TopKv(TOP, chunk, RECENT, refresh)
    texts = [words(rng, n) for n in (34, 7, 29, 25)]
    target, picked = begun(target_of(model, runtime), texts, capacity=64), Attended(model)
    chosen: list[int | None] = [None] * len(texts)
    for step in range(6):
        for row, text in enumerate(texts):
            read, before = len(text) - 1, chosen[row]
            if read > TOP + RECENT and (before is None or 0 < refresh <= read - before):
                chosen[row] = read
        trees = [random_tree(rng, text[-1], n) for text, n in zip(texts, (5, 2, 1, 1), strict=False)]
        scores = target.score(trees, view).logits
        for row, (tree, at) in enumerate(zip(trees, chosen, strict=True)):
            tokens = [tree.tokens[i] for i in tree.path(len(tree) - 1)]
            if at is None:
                plain = picked.logits(texts[row][:-1], tokens, 100, 100)[-1]
            else:
                plain = picked.logits_of(texts[row], tokens, at, chunk)[-1]
            assert error(scores[row, len(tree) - 1], plain) < 1e-3, (step, row)
        target.score([DraftTree.chain(text[-1], [3]) for text in texts])
        target.commit([[0, 1]] * len(texts))
        for text in texts:
            text += [3, rng.randrange(30)]
        if step == 2:
            target.release(0)
            texts[0], chosen[0] = texts.pop(), chosen.pop()
    assert None not in chosen, "one had room for all of its positions at first"


def test_entries_chosen_anew_follow_the_subject() -> None:
    """Of a text that is copied with changes, each part in turn."""
    model, tokenizer = load("nano", "float32")
    item = next(load_.items[0] for load_ in embedded() if load_.name == "edit")
    inputs = tokenizer(item.text, return_tensors="pt", return_token_type_ids=False)
    accepted = []
    for refresh in (0, 8):
        knobs = f"entries=64,recent=16,refresh={refresh},depth=4,nodes=4"
        fast = truedraft.accelerate(model, draft=f"top-kv:{knobs}", control="fixed")
        fast.generate(**inputs, max_new_tokens=96, do_sample=False)
        accepted.append(fast.report().mean_acceptance_length)
    assert accepted[1] > 1.5 * accepted[0]


LATENT, UNSEEN = "it keeps latents, and no keys", "its layers do not call torch's attention"


@pytest.mark.parametrize(
    ("architecture", "runtime", "why"),
    [
        *[pytest.param(name, "auto", None, marks=COMPILED) for name in ("gemma2", "gemma4_text", "gpt_oss", "falcon")],
        *[(name, "stock", None) for name in ("llama", "gpt2", "falcon")],
        *[(name, "stock", UNSEEN) for name in ("gemma2", "gemma4_text", "gpt_oss")],
        pytest.param("deepseek_v3", "auto", LATENT, marks=COMPILED),
        ("deepseek_v3", "stock", LATENT),
    ],
)
def test_entries_are_chosen_by_attention_or_refused(architecture: str, runtime: str, why: str | None) -> None:
    """Queries beside those of other heads, of groups, of layers that share keys, and with sinks."""
    model = tiny(architecture, torch.float32, sharpen=1.5)
    settings = dict(max_new_tokens=12, do_sample=False)
    try:
        fast = truedraft.accelerate(model, draft="top-kv:entries=4,recent=3,chunk=2", runtime=runtime, control="fixed")
    except Refused as refused:
        assert why is not None and why in str(refused)
    else:
        assert why is None
        inputs = ragged(model, 2)
        assert torch.equal(fast.generate(**inputs, **settings), model.generate(**inputs, **settings))
        assert fast.report().acceptance_rate > 0.05


@COMPILED
@pytest.mark.parametrize("draft", ["window-kv:sinks=1,recent=3", "top-kv:entries=2,recent=2"])
def test_encoder_decoders(draft: str) -> None:
    """By tables of positions; T5's biases by distance are refused."""
    model = seq2seq("bart")
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    settings = dict(max_new_tokens=20, do_sample=False, num_beams=1)
    assert torch.equal(fast.generate(**sources(), **settings), model.generate(**sources(), **settings))
    with pytest.raises(Refused, match="its attention depends on the places of keys"):
        truedraft.accelerate(seq2seq("t5"), draft=draft)
