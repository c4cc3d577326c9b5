"""Constraints of a text: JSON objects, JSON schemas, regular expressions, choices and grammars, by llguidance.

The library compiles a grammar to a parser that gives, after any tokens, the tokens that may follow.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile
from threading import Lock
from typing import Any, Literal

import torch
from torch import BoolTensor, FloatTensor, LongTensor, Tensor, tensor
from transformers import PreTrainedTokenizerBase

from truedraft.errors import Refused
from truedraft.sampling import RowwiseProcessor
from truedraft.serve.stops import OutputText
from truedraft.stopping import RowwiseCriterion
from truedraft.text.token_text import TokenText, token_text

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
# What JSON may have between its tokens is what programs write there: nothing, a space, or a line break and indentation.
# Unbounded whitespace, which the standard allows, would let a model emit nothing else without end.
WHITESPACE = r"\x20|\x0A[\x20\x09]{0,64}"
MARKER = b"\xff"  # which no text has, and the library marks special tokens with


class Constraint(RowwiseProcessor):
    """Sets the scores of tokens that a grammar does not allow next to -inf; ends of text are allowed if it may end.

    It has precedence over the processors before it: if these exclude all that the grammar allows, what it allows has
    score 0. After a draft that the grammar forbids, and after an end of text, scores stay as they are; `Enforced` makes
    sure that neither is ever emitted. Text that the grammar forces is allowed in the tokenizer's own tokens only.

    Raises Refused, at a call, if the parser reaches one of its limits.

    Args:
        matcher: an `LLMatcher` at its start, for this processor alone.
        ends: the tokens that end a text.
        prompt: tokens of the prompt, padding included, which are not constrained.
        stops: further tokens that end this text, which are allowed if it may end, and nowhere else.
        size: tokens of the vocabulary; the parser may have more.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], prompt: int, stops: Collection[int], size: int):
        self._start, self._ends, self._prompt, self._size = matcher, ends.union(stops), prompt, size
        self._stops, self._any_end = sorted(self._ends - ends), min(ends)
        self._matcher, self._consumed = matcher.deep_copy(), list[int]()

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        outputs = input_ids[:, self._prompt :].tolist()
        rows = [self._constrained(output, row) for output, row in zip(outputs, scores, strict=True)]
        return torch.stack(rows)  # type: ignore[return-value]

    def forced(self, ids: list[int]) -> list[int]:
        """The tokens that the grammar forces, without an end of text, which the pass that verifies these emits."""
        output = ids[self._prompt :]
        if not self._ends.isdisjoint(output) or not self._follow(output):
            return []
        return [*takewhile(lambda token: token < self._size, self._matcher.compute_ff_tokens())]

    def _constrained(self, output: list[int], scores: Tensor) -> Tensor:
        """(V,) scores after the tokens of an output."""
        if not self._ends.isdisjoint(output) or (mask := self._mask(output)) is None:
            return scores
        allowed = self._with_stops(_bits(mask, len(scores)))
        if not allowed.any():  # what the grammar demands has no tokens
            return scores
        excluded = ~allowed.to(scores.device)
        constrained = scores.masked_fill(excluded, -torch.inf)
        if constrained.max() == -torch.inf:
            constrained = torch.zeros_like(scores).masked_fill_(excluded, -torch.inf)
        return constrained

    def _with_stops(self, allowed: Tensor) -> Tensor:
        """(V,) what is allowed, stop tokens like an end of text; as it is where that would leave nothing."""
        if not self._stops:
            return allowed
        found = allowed.clone()
        found[self._stops] = allowed[self._any_end]
        return found if found.any() else allowed

    def _mask(self, output: list[int]) -> bytes | None:
        """A bit for each token, whether it may follow an output; None where the grammar does not allow the output."""
        for _ in range(2):  # again from the start: earlier drafts may have contributed to a limit
            mask = self._matcher.compute_bitmask() if self._follow(output) else None
            if not self._matcher.is_error():
                return mask
        reason = _reason(self._matcher.get_error())
        raise Refused(f"the constraint cannot be enforced at this point ({reason}): simplify it")

    def _follow(self, output: list[int]) -> bool:
        """Move the parser to after these tokens; whether the grammar allows them, and the parser can follow."""
        if self._matcher.is_error():
            self._matcher, self._consumed = self._start.deep_copy(), []
        count = len(self._consumed)
        same = count if output[:count] == self._consumed else _common(output, self._consumed)
        if same < count:
            self._matcher.rollback(count - same)
        count = self._matcher.try_consume_tokens(output[same:])
        self._consumed = output[: same + count]
        return len(self._consumed) == len(output) and not self._matcher.is_error()


class Enforced(RowwiseCriterion):
    """Ends no row, but fails one whose emitted text the grammar does not allow, or that ends before it may.

    No row should; this holds whatever the processors, the rule, the drafter or the parser do.

    Args:
        matcher: an `LLMatcher` at its start, for this criterion alone.
        ends: the tokens that end the text.
        prompt: tokens of the prompt.
        least: tokens that the text must have before its end.
        text: reads the text up to a stop string; None if there are no stop strings.
        banned: sequences of tokens that the text must not have.
        spelled: the tokens of a text.
    """

    def __init__(
        self,
        matcher: Any,
        ends: frozenset[int],
        prompt: int,
        least: int = 0,
        text: OutputText | None = None,
        banned: Sequence[Sequence[int]] = (),
        spelled: Callable[[str], list[int] | None] = lambda text: None,
    ):
        self._start, self._matcher, self._ends, self._prompt = matcher, matcher.deep_copy(), ends, prompt
        self._least, self._text, self._spelled = least, text, spelled
        self._banned = [list(tokens) for tokens in banned]
        self._output, self._whole = list[int](), ""

    def __call__(self, input_ids: LongTensor, scores: FloatTensor, **kwargs: Any) -> BoolTensor:
        """(1,) False. input_ids: (1, length) prompt and output.

        Raises:
            Refused: the text is not that of the grammar, or ends where it may not.
        """
        for token in input_ids[0, self._prompt + len(self._output) :].tolist():
            self._output.append(token)
            self._add(token)
            if any(self._output[-len(tokens) :] == tokens for tokens in self._banned):
                raise Refused("bad_words has a word that the constraint demands here: leave it or the constraint out")
        return tensor([False])  # type: ignore[return-value]

    def _add(self, token: int) -> None:
        count = len(self._output)
        if token in self._ends:
            if not self._matcher.is_accepting():
                raise Refused("the text ended before its constraint allowed it to: leave out stop_token_ids")
            if count <= self._least:
                raise Refused(
                    f"min_tokens={self._least} cannot be kept, since the constraint allows no more than {count - 1} "
                    "tokens here: lower min_tokens, or leave the constraint out"
                )
        elif self._matcher.try_consume_tokens([token]) != 1 or self._matcher.is_error():
            raise Refused(
                "the constraint demands a text that cannot be followed here, or that no tokens of this model stand "
                "for: simplify it"
            )
        elif self._text is not None:
            self._whole += self._text.feed([token])
            if self._text.found is not None and not self._allows(self._whole):
                raise Refused(
                    f"stop={_short(self._text.found)} would end the text before its constraint allows it to: "
                    "leave this stop string or the constraint out"
                )

    def _allows(self, text: str) -> bool:
        """Whether a text is a whole one of the grammar."""
        matcher, tokens = self._start.deep_copy(), self._spelled(text)
        return tokens is not None and matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


class Constraints:
    """Compiles the constraints of requests, and keeps the compiled ones that were used last. For several threads.

    Args:
        tokenizer: a fast tokenizer.
        vocabulary: size of the model's, which may be larger than the tokenizer's.
        ends: the tokens that end a text.
        length: most characters of a definition.
        depth: most levels of a JSON schema.
        kept: compiled grammars that are kept.

    Raises:
        Refused: llguidance is not installed, or cannot read the tokenizer; or there is no end-of-text token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        ends: Sequence[int],
        length: int = 100_000,
        depth: int = 64,
        kept: int = 64,
    ):
        if not ends:
            raise Refused("a constrained text ends with an end-of-text token, and the model has none: set eos_token_id")
        self._texts = token_text(tokenizer)
        self._tokens, self._ends = _tokens_of(tokenizer, vocabulary, list(ends)), frozenset(ends)
        self._length, self._depth, self._kept = length, depth, kept
        self._compiled: OrderedDict[tuple[Kind, str, str | None], Any] = OrderedDict()
        self._lock = Lock()

    def processor(
        self, kind: Kind, definition: Any, prompt: int, around: str | None = None, stops: Collection[int] = ()
    ) -> Constraint:
        """A processor for one row; compiles the grammar in the calling thread (milliseconds to a second).

        Args:
            kind: "json_object" (definition: None), "json_schema" (a dict), "regex" (text), "choice" (a list of texts),
                "grammar" (text: Lark or GBNF).
            prompt: tokens of the request's prompt.
            around: a grammar in Lark of the whole text, in which `@body` is what the definition constrains; None if
                that is the whole text.
            stops: tokens that end the text besides ends of text.

        Raises:
            Refused: the definition is invalid, too large, or cannot be enforced whole.
        """
        matcher = self._compile(kind, definition, around)
        return Constraint(matcher, self._ends, prompt, stops, self._tokens.vocab_size - 1)

    def enforced(
        self,
        kind: Kind,
        definition: Any,
        prompt: int,
        around: str | None = None,
        stops: Collection[int] = (),
        least: int = 0,
        text: OutputText | None = None,
        banned: Sequence[Sequence[int]] = (),
    ) -> Enforced:
        """The criterion that goes with the processor of the same arguments.

        least, text, banned: as in `Enforced`.
        """
        matcher, ends = self._compile(kind, definition, around), self._ends.union(stops)
        return Enforced(matcher, ends, prompt, least, text, banned, self._texts.spelled)

    def _compile(self, kind: Kind, definition: Any, around: str | None) -> Any:
        text = self._text(kind, definition)
        key = (kind, text, around)
        with self._lock:
            matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self._matcher(kind, text, around)
            self._check_spelled(kind, definition, matcher)
        with self._lock:
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        return matcher

    def _check_spelled(self, kind: Kind, definition: Any, matcher: Any) -> None:
        """Raises Refused if the tokenizer cannot spell what the grammar forces first, or a character that it names."""
        if self._texts.spells_all:
            return
        named = {character for text in _texts_in(definition) for character in text}
        named = named if kind == "choice" else {c for c in named if not c.isascii()}  # others have a syntax, of ASCII
        lacking = [character for character in sorted(named) if self._texts.spelled(character) is None]
        if lacking or self._tokens.vocab_size - 1 in matcher.compute_ff_tokens():
            what = f"{lacking[0]!r}" if lacking else "a character"
            raise Refused(f"{kind} demands {what} that no token of this model stands for: change it")

    def _text(self, kind: Kind, definition: Any) -> str:
        """The definition as text, within the limits."""
        if kind in ("json_object", "json_schema"):
            definition = {"type": "object"} if kind == "json_object" else definition
            if not isinstance(definition, dict):
                raise Refused(f"{kind}={_short(definition)}: give a JSON schema as an object")
            if _deeper(definition, self._depth):
                raise Refused(f"{kind} has more than {self._depth} levels: give a flatter schema, or use $ref")
            definition = {key: value for key, value in definition.items() if key != "x-guidance"}  # the library's own
        elif kind == "choice":
            if not (isinstance(definition, list) and definition and all(isinstance(text, str) for text in definition)):
                raise Refused(f"choice={_short(definition)}: give a list of at least one text")
        elif not isinstance(definition, str):
            raise Refused(f"{kind}={_short(definition)}: give a text")
        text = definition if isinstance(definition, str) else json.dumps(definition)
        if len(text) > self._length:
            raise Refused(f"{kind} has {len(text)} characters: give at most {self._length}")
        return text

    def _matcher(self, kind: Kind, text: str, around: str | None) -> Any:
        """A parser at its start, whose first tokens have been computed."""
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False)  # a definition may be private
        try:
            if kind in ("json_object", "json_schema"):
                options: Any = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
            else:
                formats: dict[str, Any] = {"regex": "regex", "choice": "choice", "grammar": "grammar"}
                grammar = llguidance.grammar_from(formats[kind], text)
            if around is not None:
                grammar = _within(around, grammar)
            _, problems = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokens, limits=limits)
        except ValueError as error:
            problems = [str(error)]
        if not problems:
            matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
            matcher.compute_bitmask()
            if not matcher.is_error():
                return matcher
            problems = [matcher.get_error()]
        raise Refused(f"{kind} cannot be enforced, since llguidance reports {_reason(problems[0])!r}: change it")


class OrdinaryTokens:
    """A vocabulary as llguidance reads it: what each token adds to a text, and how texts are spelled.

    The library would read text that looks like a special token as that token, which its parser then cannot follow; here
    such text is spelled by other tokens. Tokens that end texts, and special ones, are no part of any text. After the
    model's tokens there is one more, for characters that they cannot spell.

    Args:
        texts: of the tokenizer.
        size: of the model's vocabulary.
        ends: the tokens that end a text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, texts: TokenText, size: int, ends: Sequence[int]):
        self._texts, self.eos_token_id, self._missing = texts, ends[0], size
        self.special_token_ids = [*sorted(token for token in texts.special.union(ends) if token < size), size]
        self.tokens = [*(b"" if MARKER in data else data for data in texts.vocabulary(size)), b""]
        for token in self.special_token_ids:
            self.tokens[token] = self.tokens[token] or f"<[{token}]>".encode()

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text, up to a character that no token stands for, if it has one; in its place is a token
        that the model does not have."""
        tokens = self._texts.spelled(text)
        if tokens is not None:
            return tokens
        end = next(i for i, character in enumerate(text) if self._texts.spelled(character) is None)
        return [*(self._texts.spelled(text[:end]) or ()), self._missing]


def _tokens_of(tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: list[int]) -> Any:
    """The library's `LLTokenizer` of a tokenizer."""
    try:
        import llguidance
    except ImportError:
        raise Refused("constraints need llguidance: pip install 'truedraft[serve]'") from None
    texts, name = token_text(tokenizer), type(tokenizer).__name__
    if not texts.concatenates:
        raise Refused(
            f"a constraint needs tokens that have a text of their own, and that of tokens of the {name} depends on "
            "their neighbours: leave constraints out"
        )
    size = max(vocabulary, texts.size)
    return llguidance.LLTokenizer(OrdinaryTokens(texts, size, ends), eos_token=ends)  # type: ignore[arg-type]


def _within(around: str, grammar: str) -> str:
    """A grammar of llguidance within another one, in Lark, that refers to it as `@body`."""
    whole = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": around}, {**whole, "name": "body"}]})


def _texts_in(definition: Any) -> Iterator[str]:
    """All texts of a value of JSON."""
    if isinstance(definition, str):
        yield definition
    elif isinstance(definition, dict | list):
        parts = [*definition, *definition.values()] if isinstance(definition, dict) else definition
        for part in parts:
            yield from _texts_in(part)


def _bits(mask: bytes, count: int) -> Tensor:
    """(count,) the bits of a mask, lowest first; those that it lacks are False."""
    words = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (words[:, None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).flatten().bool()
    return torch.nn.functional.pad(bits, (0, max(count - len(bits), 0)))[:count]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _deeper(value: Any, depth: int) -> bool:
    """Whether a value of JSON has more levels."""
    level = [value]
    for _ in range(depth):
        level = [
            below
            for outer in level
            if isinstance(outer, dict | list)
            for below in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _reason(message: str) -> str:
    """The line of a message that names the error: the first, or of one that quotes a regular expression the last."""
    lines = message.strip().splitlines() or ["no reason given"]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
