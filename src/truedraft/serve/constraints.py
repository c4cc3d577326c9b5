"""Constraints of a text: JSON objects, JSON schemas, regular expressions, choices and grammars, by llguidance.

The library compiles a grammar to a parser that gives, after any tokens, the tokens that may follow.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, Literal

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import PreTrainedTokenizerBase

from truedraft.errors import Refused
from truedraft.sampling import RowwiseProcessor

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
# What JSON may have between its tokens is what programs write there: nothing, a space, or a line break and indentation.
# Unbounded whitespace, which the standard allows, would let a model emit nothing else without end.
WHITESPACE = r"\x20|\x0A[\x20\x09]{0,64}"
SAMPLE = '{"name": [1, 2.5e3, true, null], "a key": "One day, a \\"word\\"\\n"}'


class Constraint(RowwiseProcessor):
    """Sets the scores of tokens that a grammar does not allow next to -inf; ends of text are allowed where it may end.

    It has precedence over the processors before it: where these exclude all that the grammar allows (a least length
    after the last brace), what it allows has score 0. After a draft that the grammar forbids, and after an end of text,
    scores stay as they are. Text that the grammar forces is allowed in the tokenizer's own tokens only.

    Raises Refused, at a call, where the parser reaches one of its limits.

    Args:
        matcher: an `LLMatcher` at its start, for this processor alone.
        ends: the tokens that end a text.
        prompt: tokens of the prompt, padding included, which are not constrained.
    """

    def __init__(self, matcher: Any, ends: frozenset[int], prompt: int):
        self._start, self._ends, self._prompt = matcher, ends, prompt
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
        return list(self._matcher.compute_ff_tokens())

    def _constrained(self, output: list[int], scores: Tensor) -> Tensor:
        """(V,) scores after the tokens of an output."""
        if not self._ends.isdisjoint(output) or (mask := self._mask(output)) is None:
            return scores
        excluded = ~_bits(mask, len(scores)).to(scores.device)
        constrained = scores.masked_fill(excluded, -torch.inf)
        if constrained.max() == -torch.inf:
            constrained = torch.zeros_like(scores).masked_fill_(excluded, -torch.inf)
        return constrained

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
        self._tokens, self._ends = _tokens_of(tokenizer, vocabulary, list(ends)), frozenset(ends)
        self._length, self._depth, self._kept = length, depth, kept
        self._compiled: OrderedDict[tuple[Kind, str], Any] = OrderedDict()
        self._lock = Lock()

    def processor(self, kind: Kind, definition: Any, prompt: int) -> Constraint:
        """A processor for one request; compiles the grammar in the calling thread (milliseconds to a second).

        Args:
            kind: "json_object" (definition: None), "json_schema" (a dict), "regex" (text), "choice" (a list of texts),
                "grammar" (text: Lark or GBNF).
            prompt: tokens of the request's prompt.

        Raises:
            Refused: the definition is invalid, too large, or cannot be enforced whole.
        """
        text = self._text(kind, definition)
        with self._lock:
            matcher = self._compiled.get((kind, text))
        if matcher is None:
            matcher = self._matcher(kind, text)
        with self._lock:
            self._compiled[kind, text] = matcher
            self._compiled.move_to_end((kind, text))
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        return Constraint(matcher, self._ends, prompt)

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

    def _matcher(self, kind: Kind, text: str) -> Any:
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


def _tokens_of(tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: list[int]) -> Any:
    """The library's `LLTokenizer` of a tokenizer."""
    try:
        import llguidance
        import llguidance.hf
    except ImportError:
        raise Refused("constraints need llguidance: pip install 'truedraft[serve]'") from None
    name = type(tokenizer).__name__
    try:
        tokens = llguidance.hf.from_tokenizer(tokenizer, max(vocabulary, len(tokenizer)), ends)  # type: ignore[arg-type]
    except Exception as error:  # the library raises what its parsers raise
        raise Refused(f"llguidance cannot read the {name} ({_reason(str(error))}): leave constraints out") from None
    ids = tokenizer.encode(SAMPLE, add_special_tokens=False)
    read, text = tokens.decode_bytes(ids).decode("utf-8", "replace"), tokenizer.decode(ids)
    if read.strip() != str(text).strip():
        raise Refused(f"llguidance reads the tokens of the {name} as other text ({read!r}): leave constraints out")
    return tokens


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
