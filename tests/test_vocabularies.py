"""Draft models with another tokenizer: texts in their tokens, and the target's text whatever they draft."""

from __future__ import annotations

import copy
import itertools
import re
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import (
    AutoTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils.import_utils import is_protobuf_available

import truedraft
from models import ragged, tiny
from nets import ACROSS, drafter
from test_seq2seq import tiny as seq2seq
from truedraft import Refused, registry
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._shaped import ShapedDrafter
from truedraft.drafters.models._model import ModelDrafter
from truedraft.drafters.models._vocabularies import Rendering, Vocabularies, by_bytes, token_bytes
from truedraft.drafters.models.string_level_rejection import FirstTokens, Place
from truedraft.loading import load, load_tokenizer
from truedraft.tree import DraftTree, Row
from vocabularies import spelling, turned

SHARED = Path(__file__).resolve().parents[2] / "shared"
FOLDERS = {
    "llama": "weights/bitllama_3M", "letters": "weights/babyllama_tok105",
    "gpt2": "tokenizers/gpt2", "neox": "tokenizers/gpt_neox_20B", "llama2": "tokenizers/llama2",
}  # fmt: skip
EMBEDDED = ("nano", "nano-gec")
TEXTS = (
    "once upon a time, there was a little girl named lily. she  wanted   to see the dog.",
    "def add(one, two):\n    if one:\n\n        return one + two  # why\n\treturn two\n",
    "Grüße: 漢字かな交じり文、🙂 naïve café — done…",
    " a leading space, and a trailing one ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
)
MODELS = [
    name for name in registry.names("drafters")
    if issubclass(registry.method("drafters", name), ModelDrafter | ShapedDrafter)
    and "draft model" in registry.method("drafters", name).card.needs
]  # fmt: skip


@cache
def tokenizer(name: str) -> PreTrainedTokenizerBase:
    if name in EMBEDDED:
        return load(name)[1]
    for folder in (SHARED / FOLDERS[name], SHARED / "data" / FOLDERS[name]):
        if folder.is_dir():
            if name == "llama2" and not is_protobuf_available():
                pytest.skip("Llama 2 has a SentencePiece model alone, which transformers reads by protobuf")
            kind = {"gpt2": GPT2Tokenizer, "llama2": LlamaTokenizer}.get(name, AutoTokenizer)
            return kind.from_pretrained(folder)  # type: ignore[no-any-return]
    pytest.skip(f"{FOLDERS[name]} is not on this machine")


@pytest.mark.skipif(is_protobuf_available(), reason="protobuf is there, which such tokenizers need")
def test_a_tokenizer_of_sentencepiece_alone_names_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(Refused, match="its tokenizer is a SentencePiece model"):
        load_tokenizer(str(tmp_path))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("target", "draft"), permutations([*FOLDERS, *EMBEDDED], 2))
def test_a_text_that_grows_by_tokens_is_as_the_other_tokenizer_splits_it(target: str, draft: str) -> None:
    mine, other = tokenizer(target), tokenizer(draft)
    vocabularies, split = Vocabularies(mine, other), 0
    ends = [token for token in (other.eos_token_id, other.unk_token_id) if token is not None]
    for text in TEXTS:
        ids = mine.encode(text)
        if mine.unk_token_id in ids or mine.decode(ids, skip_special_tokens=True) != text:
            continue
        rendering, before = Rendering(vocabularies), 0
        for i in range(1, len(ids) + 1):
            found = rendering.continued(ids[:i]).whole
            assert before <= len(rendering.ids) and rendering.whole == found
            before = len(rendering.ids)
        whole = other.encode(text)
        kept = [token for token in whole if token not in ends[:1]]
        assert [token for token in found if token not in ends[:1]] == kept or len(text) > 200, text
        assert Rendering(vocabularies).continued(ids).whole == found
        drafted = Rendering(vocabularies).continued(ids[:-2], ids[-2:]).whole
        assert drafted == found
        split += 1
    assert split or mine.unk_token_id is not None


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
TURNS = [
    {"role": "system", "content": "You are a helpful robot."},
    {"role": "user", "content": "Tell me a story, 🙂 please!"},
]
WHOLE = ("llama", "gpt2", "nano")  # that keep all of a text


@pytest.mark.parametrize("target", WHOLE)
def test_a_conversation_is_read_without_the_special_tokens_that_a_draft_model_has_not(target: str) -> None:
    """Also where a text goes on in the middle of a character: its first bytes have no token yet."""
    mine = copy.deepcopy(tokenizer(target))
    mine.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    ids = mine.apply_chat_template(TURNS, chat_template=CHAT, return_dict=False)
    marks = {mine.convert_tokens_to_ids(mark) for mark in ("<|im_start|>", "<|im_end|>")}
    assert sum(token in marks for token in ids) == 5
    texts = token_bytes(mine)
    for draft in WHOLE:
        other = tokenizer(draft)
        own, rendering = token_bytes(other), Rendering(Vocabularies(mine, other))
        for i in range(1, len(ids) + 1):
            whole = rendering.continued(ids[:i]).whole
            assert not {other.unk_token_id, *marks} - {None} & set(whole) or draft == target
            spelled = b"".join(own.get(token, b"") for token in whole)
            text = b"".join(texts.get(token, b"") for token in ids[:i]).decode(errors="ignore").encode()
            assert spelled.lstrip() == text.lstrip(), draft
    same = copy.deepcopy(tokenizer(WHOLE[0]))
    same.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]})
    whole = Rendering(Vocabularies(mine, same)).continued(ids).whole
    mark = same.convert_tokens_to_ids("<|im_start|>")
    assert whole.count(mark) == 3 and same.convert_tokens_to_ids("<|im_end|>") in whole


def test_a_tokenizer_that_loses_text_drafts_behind_the_word_that_it_lost() -> None:
    """Letters have no ideographs: unknown tokens stand for them."""
    mine, other = tokenizer("neox"), tokenizer("letters")
    rendering = Rendering(Vocabularies(mine, other)).continued(mine.encode("the 漢字 dog", add_special_tokens=False))
    assert rendering.whole == other.encode("the 漢字 dog")
    assert other.unk_token_id in rendering.ids and rendering.word == b" dog"


def test_the_bytes_of_tokens() -> None:
    pieces = {"<unk>": 0, "<0x0A>": 1, "▁": 2, "▁a": 3, "b": 4, "é": 5}
    made = Tokenizer(BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieced = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    assert token_bytes(pieced) == {1: b"\n", 2: b" ", 3: b" a", 4: b"b", 5: "é".encode()}
    words = Tokenizer(WordPiece({"[UNK]": 0, "go": 1, "##ing": 2}, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")) == {1: b" go", 2: b"ing"}
    assert token_bytes(spelling(7))[0] == b" "


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "seeded"])
def test_the_text_is_the_targets_across_vocabularies(name: str, sample: bool) -> None:
    model = tiny("llama")
    knobs = {"serial": 3} if name == "pearl" else {}  # else it drafts behind tokens that were right, and none is
    made = drafter(name if name == "string-level-exact" else f"{name}{ACROSS}", model, **knobs)
    fast = truedraft.accelerate(model, draft=made, control="fixed")
    inputs = ragged(model, 3)
    for seed in range(2 if sample else 1):
        torch.manual_seed(seed)
        expected = model.generate(**inputs, max_new_tokens=30, do_sample=sample)
        torch.manual_seed(seed)
        assert torch.equal(fast.generate(**inputs, max_new_tokens=30, do_sample=sample), expected)
    assert any(one.offered for of_pass in fast.report().passes for one in of_pass.emitted)


@pytest.mark.parametrize("name", ["draft-model", "string-level-exact", "string-level-rejection:length=8"])
def test_a_draft_model_that_is_the_target_in_other_ids_is_right(name: str) -> None:
    """Of letters alone a text has one tokenization."""
    model = tiny("llama", vocabulary=27)
    made = registry.load("drafters", name, model=turned(model, 5))
    made.own_tokenizer = spelling(54, 5, pairs=27)
    fast = truedraft.accelerate(model, spelling(54, pairs=27), draft=made, control="fixed")
    ids = torch.tensor([[3, 1, 4]])
    assert torch.equal(fast.generate(ids, max_new_tokens=40), model.generate(ids, max_new_tokens=40))
    report = fast.report()
    assert report.tokens / len(report.passes) > 4


def test_a_draft_is_the_text_that_the_draft_model_goes_on_with_and_one_call_of_it() -> None:
    """Up to a token without text, which ends it."""
    model, mine, other = tiny("llama", torch.float32, vocabulary=27), spelling(54, pairs=27), spelling(54, 3, pairs=27)
    small = tiny("llama", torch.float32, vocabulary=30, sharpen=2.0)
    made: Any = registry.load("drafters", "string-level-exact", model=small, length=12, tokens=5)
    made.own_tokenizer = other
    fast = truedraft.accelerate(model, mine, draft=made, control="fixed")
    target, propose, calls = made.reader.target, made.propose, list[str]()
    for name in ("extend_tapped", "extend_greedily"):
        passed = getattr(target, name)
        setattr(target, name, lambda *given, name=name, passed=passed: (calls.append(name), passed(*given))[1])
    asked, drafted = itertools.cycle((5, 2, 1)), list[int]()

    def checked(rows: list[Row], budget: list[int]) -> list[DraftTree]:
        budget = [next(asked)] * len(rows)
        trees: list[DraftTree] = propose(rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            own = torch.tensor([other.encode(mine.decode(row.tokens))])
            whole = small.generate(own, attention_mask=torch.ones_like(own), max_new_tokens=12, do_sample=False)[0]
            text = other.decode([*itertools.takewhile(len(other).__gt__, whole.tolist())])
            assert text.startswith(mine.decode([*row.tokens, *tree.tokens[1:]])) and len(tree) - 1 <= budget[0]
            drafted.append(len(tree) - 1)
        return trees

    made.propose = checked
    fast.generate(**ragged(model, 2), max_new_tokens=30, do_sample=False)
    assert calls == ["extend_greedily"] * len(calls) and len(calls) == len(drafted) // 2, "one call for both rows"
    assert {1, 2, 5} <= set(drafted), "drafts reach their budgets"


def first_token_law(
    model: PreTrainedModel, draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, text: str
) -> dict[int, float]:
    """The law of the first of the target's tokens, the longest one, behind a text that a draft model goes on with from
    its last word on: by plain forwards over all splits of all texts."""
    texts = {target.decode([token]): token for token in target.get_vocab().values()}
    longest = max(map(len, texts))
    begins = max(one.start() for one in re.finditer("(?<! ) ", text))
    word, before = text[begins:], draft.encode(text[:begins])
    found, level = dict.fromkeys(texts.values(), 0.0), {(): 1.0}
    while level:
        later = {}
        for split, p in level.items():
            with torch.no_grad():
                law = model(torch.tensor([[*before, *split]]), use_cache=False).logits[0, -1].softmax(-1).tolist()
            for own in draft.get_vocab().values():
                spelled = draft.decode([*split, own])
                if spelled.startswith(word) and len(spelled) >= len(word) + longest:
                    beyond = spelled[len(word) :]
                    first = max((one for one in texts if beyond.startswith(one)), key=len)
                    found[texts[first]] += p * law[own]
                elif spelled.startswith(word) or word.startswith(spelled):
                    later[*split, own] = p * law[own]
        level = later
    whole = sum(found.values())
    return {token: p / whole for token, p in found.items()}


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_drawn_by_the_probabilities_of_their_strings(seed: int) -> None:
    mine, other = spelling(8, pairs=0), spelling(8, 3, pairs=1)
    model, small = (tiny("llama", torch.float32, 1.5, vocabulary=8) for _ in range(2))
    made = registry.load("drafters", "string-level-rejection", model=small, nodes=256, beam=64, least=0.0)
    made.own_tokenizer = other
    texts, trees, propose = [], [], made.propose

    def proposed(rows: list[Row], budget: list[int]) -> list[DraftTree]:
        texts.append([*rows[0].tokens])
        trees.extend(propose(rows, budget))
        return trees[-1:]

    made.propose = proposed
    fast = truedraft.accelerate(model, mine, draft=made, rule="rejection", control="fixed")
    torch.manual_seed(seed)
    ids = torch.tensor([mine.encode("b ab cba c")])
    fast.generate(ids, max_new_tokens=9, do_sample=True, top_k=0, temperature=0.5)
    for tokens, tree in list(zip(texts, trees, strict=True))[:2]:
        for node in range(len(tree) - 1):
            text = mine.decode([*tokens, *tree.tokens[1 : node + 1]])
            law = first_token_law(small, other, mine, text)
            sharper = torch.tensor([law[token] for token in range(8)]).square()
            assert torch.allclose(tree.dist[node], sharper / sharper.sum(), atol=1e-5)
    assert max(map(len, trees[:2])) > 3


PLACES = [
    Place(b""), Place(b"", b" "), Place(b"", b" th"), Place(b"", b"\n"), Place(b"", b"\xff"), Place(b" "),
    Place(b" the"), Place(b" there"), Place(b" Q"), Place(b"\xc3"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "draft"), [("letters", "llama"), ("llama", "nano")])
def test_what_a_token_makes_of_a_text_is_the_longest_token_that_it_begins_with(target: str, draft: str) -> None:
    """By comparing some tokens of the draft model, special ones among them, with every token of the target."""
    mine, other = tokenizer(target), tokenizer(draft)
    vocabularies, size, own_size = Vocabularies(mine, other), len(mine), len(other) + 3
    tables, own_texts = FirstTokens(vocabularies, size, own_size), token_bytes(other)
    ids = by_bytes(mine, token_bytes(mine))
    for awaited, beyond in PLACES:
        table = tables.table(Place(awaited, beyond))
        found = dict(zip(table.own.tolist(), table.first.tolist(), strict=True))
        unfinished = set(table.own[table.unfinished].tolist())
        spelled = [own for own, text in own_texts.items() if awaited.startswith(text) or text.startswith(awaited)]
        for own in {*range(0, own_size, 37), *range(own_size - 9, own_size), *spelled[:: 1 + len(spelled) // 50]}:
            text = own_texts.get(own, b"")
            behind = (beyond + text)[len(awaited) :]
            begun = max((one for one in ids if behind.startswith(one)), key=len, default=b"")
            agrees, awaits = text[: len(awaited)] == awaited[: len(text)], len(text) < len(awaited)
            if text and agrees:
                expected = ids.get(begun, size)
                goes_on = awaits or any(one.startswith(behind) and one != behind for one in ids)
            else:
                special = vocabularies.reverse.special(own) if not text and not awaited + beyond else None
                ended = ids.get(begun, size) if beyond and not text else size + 1
                expected, goes_on = ended if special is None else special, False
            assert found.get(own, table.other) == expected and (own in unfinished) == goes_on, (awaited, beyond, text)


def test_splits_of_the_last_word_are_read_behind_the_words_before() -> None:
    """Several nodes in the first pass of a draft, with tokens before its root; rejected ones are read no more."""
    model = tiny("llama", vocabulary=8)
    made: Any = drafter("string-level-rejection", model, length=1)
    propose, passes = made.propose, itertools.count()
    made.propose = lambda rows, budget: propose(rows, [most * (next(passes) % 8 < 2) for most in budget])
    grow, several = made.grow, []

    def checked(growing: GrowingTree, nodes: list[int], laws: torch.Tensor) -> None:
        several.append(growing.root > 0 and len(nodes) > 1 and growing.passes == 0)
        for node, law in zip(nodes, laws, strict=True):
            path = []
            while node > growing.root:
                path.append(growing.ids[node])
                node = growing.parent[node]
            ids = torch.tensor([[*growing.state.text, *path[::-1]]])
            with torch.no_grad():
                assert torch.allclose(made.model(ids, use_cache=False).logits[0, -1].softmax(-1), law)
        grow(growing, nodes, laws)

    made.grow = checked
    fast = truedraft.accelerate(model, draft=made, control="fixed")
    torch.manual_seed(0)
    fast.generate(torch.randint(8, (1, 9)), max_new_tokens=30, do_sample=True)
    assert sum(several) > 1 and not all(several)


@pytest.mark.parametrize("name", ["draft-model", "string-level-exact", "string-level-rejection"])
def test_sources_are_not_rendered(name: str) -> None:
    model = seq2seq("t5")
    made = registry.load("drafters", name, model=model)
    made.own_tokenizer = spelling(20, 3)
    with pytest.raises(Refused, match=f"{name}: the draft model has another tokenizer"):
        truedraft.accelerate(model, spelling(20), draft=made)


@pytest.mark.parametrize("name", ["string-level-exact", "string-level-rejection"])
def test_what_is_refused(name: str) -> None:
    model = tiny("llama")
    with pytest.raises(Refused, match=f"{name} needs both tokenizers: give accelerate"):
        truedraft.accelerate(model, draft=registry.load("drafters", name, model=tiny("llama")))


def test_the_way_is_chosen_by_the_tokenizers_and_the_rule(tmp_path: Path) -> None:
    """A draft model given as a model: its tokenizer is that beside its files, or of `assistant_tokenizer`."""
    model, mine, other = tiny("llama", vocabulary=54), spelling(54, pairs=27), spelling(20, 3)
    small = tiny("llama", vocabulary=20)
    small.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    small = type(small).from_pretrained(tmp_path, dtype=small.dtype)
    ids = torch.tensor([[3, 1, 4]])
    expected = model.generate(ids, max_new_tokens=20)
    for rule, name in ((None, "string-level-exact"), ("greedy", "string-level-exact"), ("rejection", "draft-model")):
        fast = truedraft.accelerate(model, mine, draft=small, rule=rule, control="fixed")
        out = fast.generate(ids, max_new_tokens=20, do_sample=rule == "rejection")
        report = fast.report()
        assert report.drafter == name and any("another tokenizer" in note for note in report.notes)
        assert rule == "rejection" or torch.equal(out, expected)
    fast = truedraft.accelerate(model, mine, control="fixed")
    assert torch.equal(fast.generate(ids, max_new_tokens=20, assistant_model=small), expected)
    assert fast.report().drafter == "string-level-exact"
    nameless = tiny("llama", vocabulary=20, sharpen=2.0)
    given = dict(assistant_model=nameless, assistant_tokenizer=other)
    assert torch.equal(fast.generate(ids, max_new_tokens=20, **given), expected)
    made = fast._assisted
    fast.generate(ids, max_new_tokens=20, **given)
    assert fast._assisted is made and fast.report().drafter == "string-level-exact"
    with pytest.raises(Refused, match="20 tokens, the model 54"):
        fast.generate(ids, max_new_tokens=20, assistant_model=nameless)


def test_tokenizers_of_assistants_are_checked() -> None:
    model, fast = tiny("llama"), truedraft.accelerate(tiny("llama"))
    ids = torch.tensor([[3, 1, 4]])
    for given, message in (
        (dict(assistant_tokenizer=spelling(20)), "with that model"),
        (dict(assistant_tokenizer="name", assistant_model=model), "give the tokenizer of an assistant_model"),
        (dict(assistant_tokenizer=spelling(20), assistant_model=model), r"give that to accelerate\(\)"),
    ):
        with pytest.raises(Refused, match=message):
            fast.generate(ids, max_new_tokens=4, **given)
