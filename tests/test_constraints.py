"""Constrained texts: what may follow, against languages written out; texts of JSON, against `jsonschema` and `json`."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import truedraft
from models import V, tiny
from nets import EVERY, RULES, drafter, generated
from tokenizers_for_tests import tokenizer_of
from truedraft import Refused
from truedraft.chance import PositionNoise
from truedraft.serve.constraints import Constraint, Constraints, Kind
from truedraft.serve.processors import OutputPenalties
from truedraft.serve.stops import OutputText
from truedraft.text.pieces import Pieces
from truedraft.text.token_text import token_text
from truedraft.tree import Row
from vocabularies import tokenized

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
END = 2
LETTERS = '{}[]":,.-ĠĊĉ' + "0123456789" + "abcdefghijklmnopqrstuvwxyz"
WORDS = ['{"', '":', '",', "true", "false", "null", "10", "an", "id", "na"]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few longer tokens: 59 of the model's 61."""
    words = ["<pad>", "<s>", "</s>", *LETTERS, *WORDS][: V - 2]
    plain = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<pad>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", pad_token="<pad>", bos_token="<s>")


def bytes_of(token: int) -> str:
    return "" if token < 3 or token >= len(tokenizer()) else str(tokenizer().decode([token]))


@cache
def constraints() -> Constraints:
    return Constraints(tokenizer(), V, [END])


@cache
def model() -> PreTrainedModel:
    return tiny("llama", torch.float32)


def processor(kind: Kind, definition: Any, prompt: int = 0) -> Constraint:
    return constraints().processor(kind, definition, prompt)


def allowed(constraint: Constraint, output: list[int]) -> list[int]:
    """The tokens that are left after an output."""
    scores = torch.randn(1, V)
    found = constraint(torch.tensor([output], dtype=torch.long), scores)  # type: ignore[arg-type]
    assert torch.equal(found[found.isfinite()], scores[found.isfinite()])
    return found[0].isfinite().nonzero().flatten().tolist()


LANGUAGES: list[tuple[Kind, Any, list[str]]] = [
    ("choice", ["an ant", "an", "a nation", "10", ""], ["an ant", "an", "a nation", "10", ""]),
    ("regex", "(na|b){1,3}[10]?", [
        a + b + c + d for a in ("na", "b") for b in ("", "na", "b") for c in ("", "na", "b") for d in ("", "0", "1")
    ]),
    ("grammar", 'start: "id" sign? NUMBER\nsign: "-"\nNUMBER: /[0-9]{1,2}/', [
        f"id{sign}{number}" for sign in ("", "-") for number in [*map(str, range(10)), *(f"{i:02}" for i in range(100))]
    ]),
    ("grammar", 'root ::= "a" ("b" | "c") root2\nroot2 ::= "d"', ["abd", "acd"]),
    ("json_schema", {"enum": ["an", 10, None, True]}, ['"an"', "10", "null", "true"]),
    ("json_schema", {"type": "integer", "minimum": -1, "maximum": 12}, [str(i) for i in range(-1, 13)] + ["-0"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "definition", "language"), LANGUAGES)
def test_what_may_follow_is_what_a_text_of_the_language_continues_with(
    kind: Kind, definition: Any, language: list[str]
) -> None:
    """At random prefixes in any order, as in draft trees; tokens that cannot follow are drafted in between.

    Of text that the grammar forces llguidance may allow one tokenisation alone, that of the tokenizer.
    """
    rng, constraint = random.Random(1), processor(kind, definition)
    for _ in range(15):
        output: list[int] = []
        while True:
            text = "".join(map(bytes_of, output))
            expected = [t for t in range(V) if bytes_of(t) and any(w.startswith(text + bytes_of(t)) for w in language)]
            found = allowed(constraint, output)
            assert found == allowed(processor(kind, definition), output)
            forced = text not in language and len({w[len(text)] for w in language if w.startswith(text)}) == 1
            if forced:
                assert found and set(found) <= set(expected), text
            else:
                assert found == sorted(expected + [END] * (text in language)), text
            strange = [*output, rng.randrange(V), rng.randrange(V)]
            if any(token not in expected for token in strange[len(output) : -1]):
                assert allowed(constraint, strange) == list(range(V))
            if not expected or rng.random() < 0.2:
                break
            output.append(rng.choice(expected))
        assert allowed(constraint, [*output, END]) == list(range(V))


SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [3, 21, 99]}},
        "required": ["name", "age"], "additionalProperties": False,
    },
    "nested": {
        "type": "object", "required": ["in"], "additionalProperties": False,
        "properties": {"in": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
                              "required": ["b"], "additionalProperties": False}},
    },
    "enum": {"enum": ["red", "dead", 3, None, [1, "a"]]},
    "array": {"type": "array", "items": {"enum": [0, 1, "a"]}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "id"}], "items": False, "minItems": 2},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 9}, "maxItems": 2},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 20, "maximum": 90},
    "$ref": {
        "$defs": {"tree": {"type": "object", "properties": {"l": {"$ref": "#/$defs/tree"}, "v": {"enum": [1, 2]}},
                           "required": ["v"], "additionalProperties": False}},
        "$ref": "#/$defs/tree",
    },
    "anyOf": {
        "anyOf": [{"type": "string", "pattern": "^a[bc]{2,3}$"}, {"type": "integer", "minimum": 5, "maximum": 12}]
    },
    "allOf": {"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "maximum": 5, "minimum": 0}}},
                        {"required": ["a"], "additionalProperties": {"enum": [1]}, "maxProperties": 2}]},
}  # fmt: skip
STEPS, PROMPT = 90, [1, 14, 22, 9, 30, 14, 22, 9]


def texts(draft: str, definition: Any, seeds: list[int | None], kind: Kind = "json_schema") -> list[list[int]]:
    """One for each seed, None for greedy, in one engine."""
    found = drafter(draft, model()) if ">" not in draft else truedraft.accelerate(model(), draft=draft).drafter
    with tokenized(model(), draft=found, control="fixed").engine(max_rows=4, max_tokens=128) as engine:
        requests = [
            engine.add_request(
                torch.tensor(PROMPT), max_new_tokens=STEPS, do_sample=seed is not None, top_k=0, seed=seed,
                eos_token_id=END, pad_token_id=0, logits_processor=[processor(kind, definition, len(PROMPT))],
            )
            for seed in seeds
        ]  # fmt: skip
        while engine.has_unfinished_requests():
            engine.step()
    return [request.result() for request in requests]


def valid(text: list[int], schema: Any) -> bool:
    """Whether it is whole; it has to be valid then."""
    if text[-1] != END:
        return False
    jsonschema.validate(json.loads(tokenizer().decode(text[:-1])), schema, jsonschema.Draft202012Validator)
    return True


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_is_valid_and_that_without_drafts(name: str) -> None:
    seeds = [None, *range(12)]
    plain = texts("plain", SCHEMAS[name], seeds)
    whole = [valid(text, SCHEMAS[name]) for text in plain]
    assert sum(whole) >= 8, "a test of texts that end"
    assert texts("prompt-lookup", SCHEMAS[name], seeds) == plain
    assert texts("draft-model", SCHEMAS[name], seeds[:5]) == plain[:5]


def test_a_json_object_is_one() -> None:
    found = texts("token-recycling", None, list(range(16)), "json_object")
    assert sum(valid(text, {"type": "object"}) for text in found) >= 8


def test_texts_are_those_of_plain_forwards_with_the_processor_applied_by_hand() -> None:
    for name in ("object", "array"):
        seeds = [None, 3, 4]
        for seed, text in zip(seeds, texts("token-recycling", SCHEMAS[name], seeds), strict=True):
            output: list[int] = []
            noise = PositionNoise([(seed or 0, 0)])
            while len(output) < STEPS and END not in output:
                ids = torch.tensor([[*PROMPT, *output]])
                with torch.no_grad():
                    raw = model()(ids, use_cache=False).logits[:, -1].float()
                scores = processor("json_schema", SCHEMAS[name], len(PROMPT))(ids, raw)  # type: ignore[arg-type]
                row = Row(0, ids[0].tolist(), len(PROMPT), STEPS)
                output.append(int(scores.argmax()) if seed is None else noise.pick(scores.softmax(-1), [row])[0])
            assert text == output


@pytest.mark.parametrize("name", EVERY)
def test_every_drafter_keeps_the_constrained_text_of_generate(name: str) -> None:
    """In a batch of three rows, whose prefixes one processor follows in turn."""
    rule = [*RULES][EVERY.index(name) % 2]
    ids = torch.tensor([PROMPT, PROMPT[::-1], [5, 6, 7, 8] * 2])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made = {"logits_processor": lambda: [processor("json_schema", SCHEMAS["object"], len(PROMPT))]}
    settings = {"max_new_tokens": 40, "eos_token_id": END, "pad_token_id": 0, **RULES[rule]}
    plain = generated(model(), inputs, **settings, **made)
    draft = drafter(name, model(), plain.text, [0, 0, 0])
    references = {"references": [[row] for row in plain.text]} if draft is not None and draft.takes_references else {}
    fast = tokenized(model(), draft=draft, control="fixed")
    torch.manual_seed(5)
    text = fast.generate(**inputs, **settings, **references, logits_processor=made["logits_processor"]())
    assert torch.equal(text, plain.text)
    assert any(valid([*row[: row.index(END)], END], SCHEMAS["object"]) for row in text[:, 8:].tolist() if END in row)


FORCED: list[tuple[Kind, Any]] = [
    ("json_schema", SCHEMAS["object"]), ("json_schema", SCHEMAS["nested"]), ("choice", ["an ant and an id", "be it"]),
    ("grammar", 'start: "id" sign? "and, an ant" | "null,null,null"\nsign: "-"'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "definition"), FORCED)
def test_what_a_grammar_forces_is_drafted_and_accepted(kind: Kind, definition: Any) -> None:
    seeds = [None, *range(6)]
    plain = texts("plain", definition, seeds, kind)
    drafts = 0
    for text in plain:
        for at in range(len(text)):
            tokens = processor(kind, definition).forced(text[:at])
            drafts += len(tokens)
            assert tokens == text[at : at + len(tokens)]
    assert drafts > len(seeds)
    with truedraft.accelerate(model(), draft="grammar", control="fixed").engine(max_rows=1, max_tokens=128) as engine:
        request = engine.add_request(
            torch.tensor(PROMPT), max_new_tokens=STEPS, do_sample=False, eos_token_id=END, pad_token_id=0,
            logits_processor=[OutputPenalties(0.1, 0.0, 8), processor(kind, definition, len(PROMPT))],
        )  # fmt: skip
        while engine.has_unfinished_requests():
            engine.step()
    report = request.report()
    assert report.mean_acceptance_length > 1.2, (report.passes, definition)
    assert all(e.drafted == e.offered for p in report.passes for e in p.emitted)
    assert texts("grammar>prompt-lookup", definition, seeds, kind) == plain


def test_what_no_grammar_forces_is_not_drafted() -> None:
    constraint = processor("choice", ["an", "id"])
    a, n, i = tokenizer().convert_tokens_to_ids(["a", "n", "i"])
    assert constraint.forced([]) == [] and constraint.forced([a]) == [n]
    assert constraint.forced([a, n]) == constraint.forced([a, n, END]) == constraint.forced([n]) == []
    assert processor("choice", ["an"], 2).forced([n, i]) == [a, n]
    assert OutputPenalties(1.0, 0.0, 0).forced([a]) == []


def test_a_constraint_has_precedence_over_other_settings() -> None:
    """A least length that excludes the end of text, and excluded tokens: what the grammar allows is drawn evenly."""
    constraint = processor("choice", ["an", "a"])
    scores = torch.randn(1, V)
    a, n = tokenizer().convert_tokens_to_ids(["a", "n"])
    scores[0, [END, n]] = -torch.inf
    after = constraint(torch.tensor([[a]]), scores)  # type: ignore[arg-type]
    assert after[0, [END, n]].tolist() == [0.0, 0.0] and int(after.isfinite().sum()) == 2
    scores[0, n] = 3.0
    assert constraint(torch.tensor([[a]]), scores).isfinite().nonzero().tolist() == [[0, n]]  # type: ignore[arg-type]
    assert torch.isnan(constraint(torch.tensor([[a]]), torch.full((1, V), torch.nan))[0, n])  # type: ignore[arg-type]
    with truedraft.accelerate(model(), draft=None).engine(max_rows=1, max_tokens=64) as engine:
        request = engine.add_request(
            torch.tensor(PROMPT), max_new_tokens=9, min_new_tokens=8, do_sample=False, eos_token_id=END, pad_token_id=0,
            logits_processor=[processor("choice", ["an"], len(PROMPT))],
        )  # fmt: skip
        while engine.has_unfinished_requests():
            engine.step()
    assert tokenizer().decode(request.result()[:2]).startswith("an") and request.result()[-1] == END


REFUSED: list[tuple[Kind, Any, str]] = [
    ("json_schema", {"type": "array", "uniqueItems": True}, "'Unimplemented keys: .*uniqueItems"),
    ("json_schema", {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ("json_schema", {"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf constraints are not supported"),
    ("json_schema", {"oneOf": [{"type": "string"}, {"maxLength": 3}], "x-guidance": {"coerce_one_of": True}}, "oneOf"),
    ("json_schema", {"$ref": "file:///etc/passwd"}, "does not fetch"),
    ("json_schema", {"$ref": "#/nowhere"}, "'/nowhere' does not exist"),
    ("json_schema", {"type": "foo"}, "Invalid type: foo"),
    ("json_schema", {"enum": []}, "Unsatisfiable"),
    ("json_schema", {"const": float("nan")}, "expected value"),
    ("json_schema", {"const": "\ud800"}, "hex escape"),
    ("json_schema", [1], r"json_schema=\[1\]: give a JSON schema"),
    ("json_schema", "{}", "give a JSON schema as an object"),
    ("json_schema", {"description": "x" * 2000}, "has 2019 characters: give at most 2000"),
    ("regex", "(a", "unclosed group"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", "\ud800", "surrogates not allowed"),
    ("regex", 3, "regex=3: give a text"),
    ("regex", ["x" * 90], r"xxx\.\.\.: give a text"),
    ("choice", [], r"choice=\[\]: give a list"),
    ("choice", "ab", "give a list"),
    ("choice", ["a", 3], "give a list"),
    ("grammar", "start: nowhere", 'unknown name: "nowhere"'),
    ("grammar", 'start: %json {"uniqueItems": true, "x-guidance": {"lenient": true}}', "uniqueItems"),
    ("grammar", "", "No 'root' rule found"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "definition", "why"), REFUSED)
def test_what_cannot_be_enforced_is_refused(kind: Kind, definition: Any, why: str) -> None:
    bounded = Constraints(tokenizer(), V, [END], length=2000)
    with pytest.raises(Refused, match=why) as refusal:
        bounded.processor(kind, definition, 0)
    assert kind in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}])
def test_json_is_laid_out_as_programs_do(style: dict[str, Any]) -> None:
    constraint = processor("json_object", None)
    value = {"a": [1, {"b": None, "cd": "x"}], "d": {}, "e": [], "id": {"an": [[-1.5e3, True]]}}
    output: list[int] = []
    for character in json.dumps(value, **style):
        (token,) = tokenizer().encode(character)
        assert token in allowed(constraint, output), tokenizer().decode(output)
        output.append(token)
    assert allowed(constraint, output) == [END]
    for space in ("  ", "\n\n", " \n", "\n" + " " * 65):  # no model can go on for ever
        output = [*tokenizer().encode('{"a":'), *tokenizer().encode(space)]
        assert allowed(constraint, output[:-1]) != list(range(V)) == allowed(constraint, output)


def test_options_of_the_library_in_a_schema_have_no_effect() -> None:
    """Separators, for example, with which a text would not be JSON."""
    schema = {"type": "array", "items": {"enum": [10, 2]}, "minItems": 2}
    after, (comma,) = tokenizer().encode("[2"), tokenizer().encode(",")
    given = {**schema, "x-guidance": {"item_separator": "-", "whitespace_flexible": False}}
    assert allowed(processor("json_schema", given), after) == allowed(processor("json_schema", schema), after)
    assert comma in allowed(processor("json_schema", given), after)


def test_schemas_are_bounded_in_depth() -> None:
    deep: Any = {"type": "null"}
    for _ in range(10):
        deep = {"anyOf": [deep]}
    flat = Constraints(tokenizer(), V, [END], depth=22)
    assert flat.processor("json_schema", deep, 0)
    with pytest.raises(Refused, match="json_schema has more than 21 levels"):
        Constraints(tokenizer(), V, [END], depth=21).processor("json_schema", deep, 0)


@pytest.mark.parametrize("draft", ["draft-model", "grammar>token-recycling"])
def test_a_grammar_that_reaches_a_limit_ends_its_request_alone(draft: str) -> None:
    """A drafter that its neighbours share processes its drafts, and does not fail."""
    wide = {"anyOf": [{"type": "object", "properties": {f"a{i}": {"type": "null"}}} for i in range(900)]}
    found = drafter(draft, model()) if ">" not in draft else truedraft.accelerate(model(), draft=draft).drafter
    with tokenized(model(), draft=found, control="fixed").engine(max_rows=2, max_tokens=64) as engine:
        given = [processor("json_schema", wide, 8), processor("json_schema", SCHEMAS["object"], 8)]
        failed, other = (
            engine.add_request(
                torch.tensor(PROMPT), max_new_tokens=40, eos_token_id=END, pad_token_id=0, seed=3,
                do_sample=True, top_k=0, logits_processor=[one],
            )
            for one in given
        )  # fmt: skip
        while engine.has_unfinished_requests():
            engine.step()
    assert other.result() == texts("plain", SCHEMAS["object"], [3])[0][:40] and failed.finish_reason == "error"
    with pytest.raises(Refused, match=r"cannot be enforced at this point .* items; max is 2000.*simplify it"):
        failed.result()


def test_a_limit_that_drafts_contributed_to_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = processor("choice", ["an", "id"])
    a, n, i = tokenizer().convert_tokens_to_ids(["a", "n", "i"])
    first = allowed(constraint, [a])
    constraint._matcher.rollback(9)  # an error, in which it remains
    assert constraint._matcher.is_error() and constraint.forced([i]) and not constraint._matcher.is_error()
    constraint._matcher.rollback(9)
    assert allowed(constraint, [a]) == first == [n]


def test_compiled_grammars_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    few, compiled = Constraints(tokenizer(), V, [END], kept=2), []
    matcher = few._matcher
    monkeypatch.setattr(
        few, "_matcher", lambda kind, text, around: compiled.append(text) or matcher(kind, text, around)
    )
    for text in ("a", "b", "a", "c", "a", "b"):
        few.processor("regex", text, 0)
    assert compiled == ["a", "b", "c", "b"]
    one, other = few.processor("regex", "a", 0), few.processor("regex", "a", 0)
    letter = tokenizer().convert_tokens_to_ids("a")
    assert allowed(one, [letter]) == [END] and allowed(other, []) == [letter]


@cache
def constraints_of(kind: str) -> Constraints:
    found = tokenizer_of(kind)
    return Constraints(found, len(found), [found.eos_token_id])


STRANGE = ["<|stop|>", "a</s>b", "</s>", "x<s>", "<unk><|stop|>y", "<|end|>one day"]  # special tokens of some tokenizer
DEFINED: dict[Kind, Any] = {
    "choice": lambda text: [text],
    "regex": lambda text: re.escape(text) + "[ab]?",
    "json_schema": lambda text: {"const": {text: [text]}},
    "grammar": lambda text: f"start: {json.dumps(text)} /[ab]{{1,2}}/",
}
LANGUAGE: dict[Kind, Any] = {
    "choice": lambda text: re.escape(text),
    "regex": lambda text: re.escape(text) + "[ab]?",
    "json_schema": lambda text: "(?s).*",
    "grammar": lambda text: re.escape(text) + "[ab]{1,2}",
}


def walked(kind: str, constraint: Constraint, seed: int) -> list[int]:
    """An output of tokens drawn at random from those that are allowed, with its end."""
    size, end, output = len(tokenizer_of(kind)), tokenizer_of(kind).eos_token_id, list[int]()
    pick = torch.Generator().manual_seed(seed)
    while end not in output:
        scores = torch.randn(1, size, generator=pick)
        found = constraint(torch.tensor([output], dtype=torch.long), scores)[0]  # type: ignore[arg-type]
        assert found.isfinite().sum() < size / 2, "the constraint holds at every place"
        output.append(int(found.argmax()))
    return output


@pytest.mark.parametrize("kind", ["nano", "byte-level", "sentencepiece", "stories260K", "neox"])
@pytest.mark.parametrize("form", DEFINED)
def test_texts_that_look_like_special_tokens_are_spelled_by_others(kind: str, form: Kind) -> None:
    tokenizer, first = tokenizer_of(kind), tokenizer_of(kind).encode("the day", add_special_tokens=False)
    for text in STRANGE:
        definition = DEFINED[form](text)
        for seed in range(2):
            ids = walked(kind, constraints_of(kind).processor(form, definition, 0), seed)[:-1]
            for skip in (True, False):
                whole = tokenizer.decode([*first, *ids], skip_special_tokens=skip)
                read = whole.removeprefix(tokenizer.decode(first))
                assert re.fullmatch(LANGUAGE[form](text), read), (read, ids)
                assert form != "json_schema" or json.loads(read) == definition["const"]
            enforced = constraints_of(kind).enforced(form, definition, 0)
            assert not enforced(torch.tensor([[*ids, tokenizer.eos_token_id]]), None).item()  # type: ignore[arg-type]


def test_tokenizers() -> None:
    """Characters of several bytes; those that no token stands for, and tokens without a text of their own, are refused
    before anything is computed."""
    for kind, text in (
        ("sentencepiece", "é🙂"),
        ("nano", "Ünique 🎈"),
        ("babyllama", "one day"),
        ("unigram", "漢字 🐈"),
    ):
        ids = walked(kind, constraints_of(kind).processor("choice", [text], 0), 1)[:-1]
        assert token_text(tokenizer_of(kind)).text(ids) == text
    for kind, definition, why in (
        ("babyllama", ["one", "日本"], "'日'"), ("unigram", ["Ω"], "'Ω'"), ("unigram", ["one", "day;"], "';'"),
    ):  # fmt: skip
        with pytest.raises(Refused, match=f"choice demands {why} that no token of this model stands for"):
            constraints_of(kind).processor("choice", definition, 0)
    with pytest.raises(Refused, match=r"json_schema demands .* that no token"):
        constraints_of("unigram").processor("json_schema", {"const": {"a": "日本語Ω"}}, 0)
    with pytest.raises(Refused, match=r"regex demands a character that no token"):
        constraints_of("unigram").processor("regex", "%%%", 0)
    with pytest.raises(Refused, match=r"depends on their neighbours: leave constraints out"):
        constraints_of("wordpiece")
    with pytest.raises(Refused, match="set eos_token_id"):
        Constraints(tokenizer(), V, [])


def test_a_text_within_another_is_constrained_where_it_begins() -> None:
    """As after reasoning: anything up to a tag, then what the definition constrains, in every kind."""
    around = 'start: thought "\\n"~0..2 @body\nthought[lazy]: TEXT "</think>"\nTEXT: /(.|\\n)*/\n'
    found = tokenizer_of("nano")
    for form, definition, inside, outside in (
        ("choice", ["yes", "no"], "no", "maybe"),
        ("json_schema", {"enum": [1, 22]}, "22", "2 2"),
        ("regex", "a{2,3}", "aaa", "ab"),
        ("grammar", 'start: "x" | "y"', "y", "z"),
        ("json_object", None, '{"a": 1}', "{1"),
    ):
        for thought in ("well </thinking", ""):
            for text, whole in ((inside, True), (outside, False)):
                enforced = constraints_of("nano").enforced(form, definition, 0, around)  # type: ignore[arg-type]
                ids = torch.tensor(
                    [[*found.encode(f"{thought}</think>\n{text}", add_special_tokens=False), found.eos_token_id]]
                )
                if whole:
                    assert not enforced(ids, None).item()  # type: ignore[arg-type]
                else:
                    with pytest.raises(Refused):
                        enforced(ids, None)  # type: ignore[arg-type]


def test_nothing_is_emitted_that_the_grammar_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose constraint gets lost, for whatever reason, fails; its neighbours go on."""
    whole = texts("plain", SCHEMAS["object"], [3])[0]
    mask = Constraint._mask
    monkeypatch.setattr(Constraint, "_mask", lambda self, output: None if len(output) > 4 else mask(self, output))
    with truedraft.accelerate(model(), draft="prompt-lookup", control="fixed").engine(
        max_rows=2, max_tokens=128
    ) as engine:
        lost, other = (
            engine.add_request(
                torch.tensor(PROMPT), max_new_tokens=40, do_sample=True, top_k=0, seed=3, eos_token_id=END,
                pad_token_id=0, **given,
            )
            for given in (
                {"logits_processor": [processor("json_schema", SCHEMAS["object"], 8)],
                 "stopping_criteria": [constraints().enforced("json_schema", SCHEMAS["object"], 8)]},
                {},
            )
        )  # fmt: skip
        while engine.has_unfinished_requests():
            engine.step()
    assert lost.finish_reason == "error" and other.finish_reason in ("stop", "length") and len(whole) > 5
    with pytest.raises(Refused, match="the constraint demands a text that cannot be followed here"):
        lost.result()


def test_a_text_may_end_by_a_further_token_only_where_the_grammar_ends() -> None:
    """A token of `stop_token_ids`: elsewhere it is excluded, and what cannot do without it fails."""
    a, b, d, e, i = tokenizer().convert_tokens_to_ids(["a", "b", "d", "e", "i"])
    constraint = constraints().processor("regex", "(be|id|a)", 0, stops=[d, e])
    assert allowed(constraint, []) == sorted([a, b, i])
    assert allowed(constraint, [a]) == sorted([END, d, e])
    assert allowed(constraint, [b]) == [e], "as the grammar has nothing else there"
    with pytest.raises(Refused, match="ended before its constraint allowed it to: leave out stop_token_ids"):
        constraints().enforced("regex", "(be|id|a)", 0, stops=[e])(torch.tensor([[b, e]]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("string", "keep", "fails"), [
    ("n", False, True), ("an a", False, True), (" and", False, False), (" and", True, True), ("zz", False, False),
])  # fmt: skip
def test_a_stop_string_may_end_a_text_only_where_the_grammar_ends(string: str, keep: bool, fails: bool) -> None:
    ids = tokenizer_of("nano").encode("an and an", add_special_tokens=False)
    text = OutputText(Pieces(tokenizer_of("nano"), ids), [string], keep)
    enforced = constraints_of("nano").enforced("choice", ["an", "an and an"], 0, text=text)
    if fails:
        with pytest.raises(Refused, match=f"stop='{string}' would end the text before its constraint allows"):
            enforced(torch.tensor([ids]), None)  # type: ignore[arg-type]
    else:
        assert not enforced(torch.tensor([ids]), None).item()  # type: ignore[arg-type]


def test_a_least_length_that_the_grammar_has_no_text_of_fails() -> None:
    with truedraft.accelerate(model(), draft=None).engine(max_rows=1, max_tokens=64) as engine:
        for least, fails in ((2, False), (3, True)):
            request = engine.add_request(
                torch.tensor(PROMPT), max_new_tokens=9, min_new_tokens=least, do_sample=False, eos_token_id=END,
                pad_token_id=0, logits_processor=[processor("regex", "zz", len(PROMPT))],
                stopping_criteria=[constraints().enforced("regex", "zz", len(PROMPT), least=least)],
            )  # fmt: skip
            while engine.has_unfinished_requests():
                engine.step()
            assert fails or len(request.result()) == 3
            if fails:
                with pytest.raises(
                    Refused, match=r"min_tokens=3 cannot be kept, since the constraint allows no more than"
                ):
                    request.result()


def test_without_the_library_constraints_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(Refused, match=r"pip install 'truedraft\[serve\]'"):
        Constraints(tokenizer(), V, [END])
