"""Views that read the KV cache in fewer bits: passes equal those of the model over entries rounded by hand."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

import truedraft
from models import tiny
from nets import RULES
from test_native_checks import array, changed, read, taken_from
from test_runtime import random_tree, words
from test_views import COMPILED, begun, check_same_bits, check_unaffected, cut, deep, error
from truedraft import DraftTree, Refused
from truedraft.errors import NoRoom
from truedraft.runtime import rounded_entries
from truedraft.runtime.native import Failure, Op, OpKind
from truedraft.runtime.rounded_entries import CHUNK
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Prompt
from truedraft.views._together import Together
from truedraft.views.quantized_kv import QuantizedKv
from truedraft.views.skip_layers import SkipLayers

pytestmark = COMPILED
RECENT = 20
LENGTHS = (300, 3, 141, 149)  # of prompts: two chunks are rounded, none, none, one
EVERY = ["llama", "qwen3", "gpt_neox", "mixtral", "exaone4", "phi"]


def by_hand(entries: Tensor, over: int, bits: int) -> Tensor:
    """(1, heads, n, size), rounded to multiples of scales along a dimension of each chunk."""
    chunks = entries.float().unflatten(2, (-1, CHUNK))
    scale = chunks.abs().amax(over, keepdim=True) / {8: 127, 4: 7}[bits]
    return ((chunks / scale).round() * scale).nan_to_num(0.0).flatten(2, 3)


class RoundedModel:
    """A model over a text's keys and values, the first of them rounded. text: the last token is not read yet."""

    def __init__(self, model: Any, bits: int, skipped: Sequence[int] = (), windowed: Sequence[int] = ()):
        self.whole, self.model, self.bits = model, cut(model, skipped) if skipped else model, bits
        self.skipped, self.windowed = skipped, windowed

    def logits(self, text: Sequence[int], tokens: Sequence[int], rounds: int) -> Tensor:
        """(n, V) logits at tokens that follow the text; rounds: entries that are rounded."""
        read, picked = DynamicCache(), DynamicCache()
        if text:
            self.whole(torch.tensor([list(text)]), past_key_values=read, use_cache=True)
        kept = [layer for i, layer in enumerate(read.layers) if i not in self.skipped]
        for i, layer in enumerate(kept if text else []):
            keys, values = layer.keys.clone(), layer.values.clone()
            if rounds and i not in self.windowed:
                keys[:, :, :rounds] = by_hand(keys[:, :, :rounds], 3, self.bits)
                values[:, :, :rounds] = by_hand(values[:, :, :rounds], 4, self.bits)
            picked.update(keys, values, i)
        return self.model(torch.tensor([list(tokens)]), past_key_values=picked, use_cache=True).logits[0]


def rounds_of(length: int) -> int:
    return max(length - RECENT, 0) // CHUNK * CHUNK


@torch.no_grad()
def check_against_rounded(
    model: PreTrainedModel, bits: int, tolerance: float, skipped: Sequence[int] = (), windowed: Sequence[int] = ()
) -> float:
    """Trees, and chains behind scratch, after commits beyond a chunk; rows leave and enter. Returns the largest
    difference of the rounded entries' logits from those of the entries as they are."""
    view: Any = QuantizedKv({8: "int8", 4: "int4"}[bits], recent=RECENT)
    view = Together((view, SkipLayers(";".join(map(str, skipped))))) if skipped else view
    target = DecoderTarget(model)
    rng, rounded = random.Random(4), RoundedModel(model, bits, skipped, windowed)
    texts, changed = [words(rng, n) for n in LENGTHS], 0.0
    begun(target, texts, capacity=420)
    for step in range(5):
        behind = [list[int]() for _ in texts]
        for sizes in ((5, 17, 1, 3), (1, 2, 7, 1)):
            trees = [
                random_tree(rng, text[-1] if not more else 3, n)
                for text, more, n in zip(texts, behind, sizes, strict=False)
            ]
            scores = target.score(trees, view).logits
            for row, tree in enumerate(trees):
                path = behind[row] + [tree.tokens[i] for i in tree.path(len(tree) - 1)]
                text = texts[row][:-1]
                plain = rounded.logits(text, path, rounds_of(len(text)))[-1]
                assert error(scores[row, len(tree) - 1], plain) < tolerance, (step, sizes, row)
                changed = max(changed, error(scores[row, len(tree) - 1], rounded.logits(text, path, 0)[-1]))
            paths = [tree.path(len(tree) - 1) for tree in trees]
            target.advance(view, paths)
            for more, tree, path in zip(behind, trees, paths, strict=True):
                more += [tree.tokens[i] for i in path]
        trees = [random_tree(rng, text[-1], 9) for text in texts]
        target.score(trees)
        paths = [tree.path(len(tree) - 1) for tree in trees]
        target.commit(paths)
        for text, tree, path in zip(texts, trees, paths, strict=True):
            text += [*(tree.tokens[i] for i in path[1:]), 5]
        if step == 1:
            target.release(0)
            texts[0] = texts.pop()
        if step == 2:
            target.crop(0, 131)
            del texts[0][132:]
        if step == 3:
            texts.append(words(rng, 290))
            target.prefill([Prompt(torch.tensor(texts[-1]))])
    target.cache = None
    return changed


@pytest.mark.covering(1)
@pytest.mark.parametrize(("architecture", "bits"), [*product(EVERY, (8, 4)), ("bloom", 4)])
def test_the_logits_are_those_of_rounded_entries(architecture: str, bits: int) -> None:
    model = tiny(architecture, torch.float32, layers=2)
    kinds = getattr(model.config, "layer_types", None) or []
    windowed = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    assert check_against_rounded(model, bits, 5e-4, windowed=windowed) > 1e-3


@pytest.mark.parametrize("bits", [8, 4])
def test_layers_may_be_skipped_too(bits: int) -> None:
    assert check_against_rounded(deep("llama", torch.float32), bits, 5e-4, skipped=(1, 2)) > 1e-3


@pytest.mark.parametrize("kv", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_has_the_same_bits_however_it_is_scored(dtype: torch.dtype, kv: str) -> None:
    check_same_bits(deep("llama", dtype), QuantizedKv(kv, recent=RECENT), (300, 1, 160))


def test_the_whole_model_is_not_affected() -> None:
    for model in (tiny("llama", torch.float32), tiny("gemma2", torch.bfloat16)):
        check_unaffected(model, "auto", QuantizedKv("int4", "int8", RECENT), lengths=(290, 3, 170))


def long(dtype: torch.dtype, sharpen: float = 1.5) -> Any:
    """A model whose context is longer than its texts."""
    model = copy.deepcopy(tiny("llama", dtype, sharpen=sharpen, layers=2))
    model.config.max_position_embeddings = 1024
    return model


LONG = torch.randint(3, 60, (2, 400), generator=torch.Generator().manual_seed(2))
WIDTHS = torch.tensor([400, 330])
MASK = (torch.arange(400) >= 400 - WIDTHS[:, None]).long()


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("draft", "least"), [("int8-kv", 0.9), ("int4-kv", 0.5), ("quantspec", 0.2)])
def test_a_drafted_text_is_that_without_drafts(draft: str, least: float, dtype: torch.dtype, rule: str) -> None:
    """Behind prompts of 400 and 330 tokens, by `model.generate` in fp32."""
    model = long(dtype)
    ids = LONG * MASK
    given = dict(attention_mask=MASK, max_new_tokens=24, eos_token_id=None, pad_token_id=0, do_sample=False)
    given |= RULES[rule]
    fast = truedraft.accelerate(model, draft=f"{draft}:recent={RECENT},depth=3", control="fixed")
    plain = model if dtype == torch.float32 else truedraft.accelerate(model, draft=None)
    texts = []
    for way in (plain, fast):
        torch.manual_seed(5)
        texts.append(way.generate(ids, **given))
    assert torch.equal(*texts)
    rate = fast.report().acceptance_rate
    assert rate is not None and rate > least and fast.report().drafter == draft


def test_requests_that_come_and_go() -> None:
    """Their slots move, and texts are read in pieces beside rows that draft."""
    model = long(torch.float32)
    fast = truedraft.accelerate(model, draft=f"int8-kv:recent={RECENT},depth=3", control="fixed")
    texts = [LONG[:1, :n] for n in (390, 150, 280, 20)]
    given: dict[str, Any] = dict(do_sample=False, eos_token_id=None)
    lengths = (30, 8, 14, 40)
    with fast.engine(max_rows=2, max_tokens=512) as engine:
        requests = [engine.add_request(ids, max_new_tokens=n, **given) for ids, n in zip(texts, lengths, strict=True)]
        while engine.has_unfinished_requests():
            engine.step()
    for ids, n, request in zip(texts, lengths, requests, strict=True):
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, pad_token_id=0, **given)
        assert request.result() == plain[0, ids.shape[1] :].tolist()
        assert request.report().acceptance_rate > 0.9


@torch.no_grad()
def test_the_approximation_itself() -> None:
    """Its committed entries are those that passes over rounded ones have written."""
    model = long(torch.float32, 4.0)
    ids, oracle = LONG[1:, :301], RoundedModel(model, 4)
    fast = truedraft.accelerate(model, draft=None, view=f"lossy/int4-kv:recent={RECENT}")
    given: dict[str, Any] = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = fast.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, 301:].tolist()
    assert found[0] == int(model(ids).logits[0, -1].argmax())
    for n in range(1, 20):  # no chunk is completed meanwhile
        assert int(oracle.logits(ids[0].tolist(), found[:n], 256)[-1].argmax()) == found[n]
    assert found != model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, 301:].tolist()


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="transformers forward: weights or entries of fewer bits need the compiled"):
        truedraft.accelerate(tiny("llama", torch.float32), draft="int8-kv", runtime="stock")
    with pytest.raises(Refused, match="cannot read its KV cache in fewer bits: it keeps latents"):
        truedraft.accelerate(tiny("deepseek_v3", torch.float32), draft="int8-kv")
    with pytest.raises(Refused, match="two views say what is read of the KV cache"):
        truedraft.accelerate(tiny("llama", torch.float32), draft="int8-kv+window-kv")
    with pytest.raises(Refused, match="quantized-kv:kv='int2': give int8 or int4"):
        truedraft.accelerate(tiny("llama", torch.float32), draft="quantized-kv:kv=int2")
    target = begun(DecoderTarget(tiny("llama", torch.float32)), [words(random.Random(1), 300)], 400)
    monkeypatch.setattr(rounded_entries.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    with pytest.raises(NoRoom, match=r"KV cache in 8 bits needs .*: draft by a view that reads it as it is"):
        target.score([DraftTree.chain(7)], QuantizedKv())
    with pytest.raises(Refused, match="all layers attend to windows"):
        truedraft.accelerate(tiny("mistral", torch.float32), draft="int8-kv")


def test_a_window_is_read_as_it_is() -> None:
    """No operation of a layer with a window refers to rounded entries."""
    target = begun(DecoderTarget(tiny("exaone4", torch.float32)), [words(random.Random(1), 300)], 400)
    target.score([DraftTree.chain(7)], QuantizedKv(recent=RECENT))
    (copies,) = target.cache.rounded.values()  # type: ignore[union-attr]
    program = target.runner.program  # type: ignore[attr-defined]
    attending = [(op, at) for op, at in zip(program.ops, program.layers, strict=True) if op.kind == OpKind.ATTEND]
    read = [copies.pointed(op, at).weight is not None for op, at in attending]
    assert read == [not op.window for op, _ in attending] and len(set(read)) == 2
    assert set(copies.layers) == {at for op, at in attending if not op.window}


def test_there_are_no_copies_before_a_chunk_is_due() -> None:
    target = begun(DecoderTarget(tiny("llama", torch.float32)), [words(random.Random(1), n) for n in (30, 147)], 400)
    for expected, tokens in ((0, 1), (1, 2)):
        target.score([DraftTree.chain(7)] * 2, QuantizedKv(recent=RECENT))
        assert len(target.cache.rounded) == expected  # type: ignore[union-attr]
        target.score([DraftTree.chain(7, [8] * (tokens + 1))] * 2)
        target.commit([range(tokens + 1)] * 2)


def test_invalid_arguments_of_a_pass_are_refused() -> None:
    """Counts of rounded places that nodes do not see, or of parts of a chunk; operations without scales."""
    target: Any = begun(DecoderTarget(tiny("llama", torch.float32)), [words(random.Random(1), 300)], 400)
    own = target.runner._run
    ops, count, given, share, threads, _kept = taken_from(target, [DraftTree.chain(7, [8])], QuantizedKv(recent=RECENT))
    assert read(given, "rounded", 1) == [256] and own(ops, count, given, share, threads) == 0
    for wrong in (-128, 129, 384, 2**40):
        assert own(ops, count, changed(given, rounded=array([wrong])), share, threads) == Failure.NODES
    at = next(i for i in range(count) if ops[i].kind == OpKind.ATTEND)
    assert own(ops, count, changed(given, rounded=0), share, threads) == Failure.OP
    for field, wrong in (("scales", None), ("second_scales", None), ("second", None), ("apart", 384 + 7), ("form", 5)):
        spoilt = (Op * count).from_buffer_copy(ops)
        setattr(spoilt[at], field, wrong)
        assert own(spoilt, count, given, share, threads) == Failure.OP, field
    spoilt = (Op * count).from_buffer_copy(ops)
    spoilt[at].apart = 128
    assert own(spoilt, count, given, share, threads) == Failure.NODES
