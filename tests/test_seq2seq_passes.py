"""The compiled pass of encoder-decoders: the forward up to rounding, bit-identical at every width."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM
from transformers.modeling_outputs import BaseModelOutput

import truedraft
from test_runtime import BOTH, random_tree
from test_seq2seq import ARCHITECTURES, V, sources, tiny
from truedraft import DraftTree, Refused
from truedraft.runtime import native
from truedraft.runtime.seq2seq import CompiledEncoderPass
from truedraft.runtime.seq2seq_programs import SEQ2SEQ_PROGRAMS
from truedraft.targets.seq2seq import Seq2SeqTarget
from truedraft.tree import Prompt, Taps

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
EVERY = pytest.mark.parametrize("kind", SEQ2SEQ_PROGRAMS)
SOURCE, WIDTH = 11, 32
LENGTHS = (3, 1, 7, 5)


def target_of(kind: str, dtype: torch.dtype, runtime: str = "auto") -> Seq2SeqTarget:
    model = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[kind](**ARCHITECTURES[kind])).eval()
    model.load_state_dict(tiny(kind).state_dict())
    target = Seq2SeqTarget(model.to(dtype), runtime)
    assert target.fallback_reason is None
    return target


def prompts_of(rows: list[list[int]], dtype: torch.dtype) -> list[Prompt]:
    """Prompts with sources of different lengths, one padded in front and one in the middle."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(len(rows), SOURCE, WIDTH, generator=generator).to(dtype)
    source_mask = torch.ones(len(rows), SOURCE, dtype=torch.long)
    source_mask[1, :4], source_mask[2, 5:], source_mask[3, 3:6] = 0, 0, 0
    return [
        Prompt(torch.tensor(ids), states=s, source_mask=h) for ids, s, h in zip(rows, states, source_mask, strict=True)
    ]


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, V) for _ in range(count)]  # padding has no position in a plain forward of M2M100


@pytest.mark.covering(1)
@EVERY
@BOTH
def test_a_node_has_the_same_bits_however_it_is_scored(kind: str, dtype: torch.dtype) -> None:
    """In a tree or at the end of a prompt, beside longer or shorter rows: no tolerance."""
    rng, target = random.Random(2), target_of(kind, dtype)
    prefixes = [words(rng, n) for n in LENGTHS]
    trees = [random_tree(rng, ids[-1], n) for ids, n in zip(prefixes, (12, 20, 1, 5), strict=True)]
    target.reserve(4, 64)
    target.prefill(prompts_of(prefixes, dtype))
    together = target.score(trees).logits
    for leaf in range(20):
        paths = [tree.path(min(leaf, len(tree) - 1)) for tree in trees]
        whole = [
            ids[:-1] + [tree.tokens[i] for i in path] for ids, tree, path in zip(prefixes, trees, paths, strict=True)
        ]
        target.reserve(4, 64)
        alone = target.prefill(prompts_of(whole, dtype)).logits[:, 0]
        for row, path in enumerate(paths):
            assert torch.equal(alone[row], together[row, path[-1]]), (row, leaf)


@pytest.mark.covering(1)
@EVERY
@BOTH
def test_logits_are_those_of_the_forward_up_to_rounding(kind: str, dtype: torch.dtype) -> None:
    """Every node against a plain forward over its path, after a row left and another moved to its slot."""
    rng, target = random.Random(3), target_of(kind, dtype)
    target.taps = Taps((0, 1, -1))
    prefixes = [words(rng, n) for n in LENGTHS]
    prompts = prompts_of(prefixes, dtype)
    target.reserve(4, 64)
    target.prefill(prompts)
    target.commit([[0]] * 4)
    target.release(0)
    trees = [unpadded(random_tree(rng, 4, n)) for n in (9, 6, 14)]
    scores = target.score(trees)
    for slot, (row, tree) in enumerate(zip((3, 1, 2), trees, strict=True)):
        for node in range(len(tree)):
            path = tree.path(node)
            ids = torch.tensor([prefixes[row] + [tree.tokens[i] for i in path]])
            plain = target.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=prompts[row].states[None]),
                attention_mask=prompts[row].source_mask[None], decoder_input_ids=ids, output_hidden_states=True,
            )  # fmt: skip
            close(scores.logits[slot, node], plain.logits[0, -1], dtype)
            for layer in (0, 1, -1):
                close(scores.hidden[layer][slot][node], plain.decoder_hidden_states[layer][0, -1], dtype)


def unpadded(tree: DraftTree) -> DraftTree:
    return DraftTree(tuple(token or 5 for token in tree.tokens), tree.parent)


def test_padding_has_no_position_where_the_model_gives_it_none() -> None:
    trees = [DraftTree((4, 0, 0, 7), (-1, 0, 1, 2)), DraftTree((0, 9), (-1, 0)), *[DraftTree.chain(0, [0, 3])] * 2]
    scores = []
    for runtime in ("auto", "stock"):
        target = target_of("m2m_100", torch.float32, runtime)
        target.reserve(4, 64)
        target.prefill(prompts_of([[3, 4], [3, 0], [5], [0]], torch.float32))
        target.commit([[]] * 4)
        scores.append(target.score(trees).logits)
    for row, tree in enumerate(trees):
        close(scores[0][row, : len(tree)], scores[1][row, : len(tree)], torch.float32)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.float() - expected.float()).abs().max() / expected.float().std()
    assert error < (1e-4 if dtype == torch.float32 else 0.25)  # the tolerance of hosting a model


@pytest.mark.parametrize("kind", sorted(set(SEQ2SEQ_PROGRAMS) - {"longt5", "t5gemma"}))
@BOTH
def test_the_compiled_encoder_matches_the_models(kind: str, dtype: torch.dtype) -> None:
    """Padding at the end, in front and on both sides; its states are zero."""
    model = target_of(kind, dtype).model
    ids = torch.randint(1, V, (4, 13), generator=torch.Generator().manual_seed(4))
    source_mask = torch.ones_like(ids)
    source_mask[1, 9:], source_mask[2, :4], source_mask[3, :2], source_mask[3, 11:] = 0, 0, 0, 0
    ids = ids * source_mask
    expected = model.get_encoder()(input_ids=ids, attention_mask=source_mask).last_hidden_state
    found = CompiledEncoderPass(model).states(ids, source_mask)
    assert not found[source_mask == 0].any()
    for row in range(4):
        close(found[row][source_mask[row] == 1], expected[row][source_mask[row] == 1], dtype)


def test_inputs_that_the_compiled_encoder_leaves_to_the_model() -> None:
    fast = truedraft.accelerate(tiny("t5"), control="fixed")
    target, given = fast.target, sources()
    assert "encoder_outputs" in target.encoded(None, given)
    gaps = {**given, "attention_mask": given["attention_mask"].index_fill(1, torch.tensor([2]), 0)}
    embeds = tiny("t5").get_input_embeddings()(given["input_ids"])
    for left in (
        gaps,
        {"input_ids": given["input_ids"]},  # some of it is padding: generate makes the mask
        {**given, "output_hidden_states": True},
        {"inputs_embeds": embeds, "attention_mask": given["attention_mask"]},
    ):
        assert target.encoded(None, left) is left
    settings = dict(max_new_tokens=20, min_new_tokens=20)
    for inputs in (gaps, {"inputs_embeds": embeds, "attention_mask": given["attention_mask"]}):
        assert torch.equal(fast.generate(**inputs, **settings), tiny("t5").generate(**inputs, **settings))
    assert truedraft.accelerate(tiny("longt5")).target.encoded(None, given) is given


@pytest.mark.parametrize("kind", ["bart", "pegasus"])
def test_a_source_beyond_the_encoder_s_positions_fails_as_it_does_alone(kind: str) -> None:
    fast, source = truedraft.accelerate(tiny(kind)), torch.full((1, 140), 5)
    for generate in (tiny(kind).generate, fast.generate):
        with pytest.raises((IndexError, RuntimeError)):
            generate(source, max_new_tokens=4)


@pytest.mark.parametrize("kind", ["pegasus", "t5"])
def test_strict_uses_the_compiled_pass(kind: str) -> None:
    fast = truedraft.accelerate(tiny(kind), strict=True, control="fixed")
    assert fast.target.runtime.startswith("compiled pass")
    given = dict(**sources(), max_new_tokens=20, min_new_tokens=20)
    assert torch.equal(fast.generate(**given), tiny(kind).generate(**given))


def test_replaced_weights_are_used() -> None:
    target = target_of("bart", torch.float32)
    fast = truedraft.accelerate(target.model, control="fixed")
    given = dict(**sources(), max_new_tokens=20, min_new_tokens=20)
    before = fast.generate(**given)
    with torch.no_grad():
        target.model.model.decoder.layers[1].fc1.bias.add_(3.0)
        target.model.model.decoder.layers[0].encoder_attn.k_proj.weight = torch.nn.Parameter(
            -target.model.model.decoder.layers[0].encoder_attn.k_proj.weight
        )
    after = fast.generate(**given)
    assert not torch.equal(before, after) and torch.equal(after, target.model.generate(**given))


def test_unsupported_head_sizes_use_the_models_forward() -> None:
    config = CONFIG_MAPPING["bart"](**{**ARCHITECTURES["bart"], "decoder_attention_heads": 8})
    fast = truedraft.accelerate(AutoModelForSeq2SeqLM.from_config(config).eval())
    assert "heads of 4 numbers" in fast.target.runtime
    with pytest.raises(Refused, match="heads of 4 numbers"):
        truedraft.accelerate(fast.model, strict=True)


def test_a_token_outside_the_vocabulary_raises() -> None:
    target = target_of("t5", torch.float32)
    target.reserve(4, 64)
    target.prefill(prompts_of([[1]] * 4, torch.float32))
    with pytest.raises(IndexError, match="outside the vocabulary"):
        target.score([DraftTree.chain(V)] * 4)
