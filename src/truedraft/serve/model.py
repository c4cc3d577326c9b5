"""The served model: its tokenizer, its defaults, and the drafters that requests may name."""

from __future__ import annotations

import copy
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from transformers import PreTrainedTokenizerBase, StoppingCriteria

from truedraft import registry
from truedraft.accelerated import Accelerated
from truedraft.canvas.accelerated import AcceleratedCanvas
from truedraft.drafters._base import Drafter
from truedraft.errors import Refused, why
from truedraft.parts import drafter_of
from truedraft.serve.config import ServeConfig
from truedraft.serve.constraints import Constraints
from truedraft.serve.errors import ApiError
from truedraft.serve.protocol import GenerationBody
from truedraft.serve.stops import Shown, StopStrings
from truedraft.targets.quirks import steps_before_switch

RESPONSES = 1000  # responses of a namespace that later requests may refer to
RESPONSE_TOKENS = 1 << 22  # and their tokens, of 4 bytes each
EMBEDDED = ("nano", "nano-diffusion")  # models without a template, whose chats are plain text
PLAIN_TEMPLATE = "{{ bos_token }}{{ messages | map(attribute='content') | join('\\n') }}"
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ServedModel:
    """An accelerated model, and what requests refer to by name.

    Args:
        fast: the accelerated model; needs a tokenizer.
        config: the server's settings.

    Attributes:
        max_model_len: most tokens of prompt and answer together.
        defaults: sampling settings of the model's generation config, for requests that do not give them.
        end_ids: the tokens that end a text.
        files: token ids of the files that requests may name as references.

    Raises:
        Refused: there is no tokenizer, a drafter is unknown, or a file cannot be read.
    """

    def __init__(self, fast: Accelerated | AcceleratedCanvas, config: ServeConfig):
        if fast.tokenizer is None:
            raise Refused("a server needs a tokenizer: give one to accelerate()")
        self.fast: Any = fast
        self.config, self.name = config, config.name
        self.tokenizer: PreTrainedTokenizerBase = _with_template(fast.tokenizer, config)
        self.max_model_len = longest_of(fast, config)
        generation: Any = fast.model.generation_config
        self.defaults = {name: getattr(generation, name) for name in DEFAULTS if getattr(generation, name) is not None}
        ends = generation.eos_token_id
        self.end_ids: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        self.files = {name: self.encoded(_read(path), False) for name, path in config.reference.items()}
        self._plain = {name: self._loaded(name) for name in config.drafts}
        self._specs = {name: name for name in config.drafts}  # what is loaded where a request has more to draft from
        self._composed: dict[str, Drafter] = {}
        self._responses: dict[str, OrderedDict[str, array[int]]] = {}
        self._remembered: Counter[str] = Counter()
        self._lock = Lock()

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template, of the tokenizer or of the settings, and not the messages' text alone."""
        return bool(self.tokenizer.chat_template) and self.tokenizer.chat_template != PLAIN_TEMPLATE

    def _loaded(self, name: str) -> Drafter:
        if name == "none":
            return drafter_of(None)
        return self.fast.drafter if name == self.config.draft else registry.load("drafters", name)

    def replace(self, drafter: Drafter, spec: str) -> None:
        """Draft by another drafter, which gets the outputs that the default one keeps, in its place for requests that
        begin from now on. In the engine's thread.

        drafter: one that is bound to the model. spec: of it.
        """
        for other, own in zip(drafter.memories(), self.fast.drafter.memories(), strict=True):
            other.copy(own)
        with self._lock:
            self.fast.drafter = self._plain[self.config.draft] = drafter
            self._specs[self.config.draft] = spec
            self._composed.clear()

    def drafter(self, name: str | None, copies: bool, constrained: bool) -> Drafter:
        """The drafter of a request; made at the first request of its kind, and shared by later ones.

        Args:
            name: as the request names it; None for the default.
            copies: whether the request has references.
            constrained: whether a grammar constrains its text; then what that forces is drafted too.

        Raises:
            ApiError: it may not be named, or drafts nothing though there are references.
        """
        name = self.config.draft if name is None else name
        if name not in self._plain:
            known = ", ".join(self._plain)
            raise ApiError(400, f"draft={name!r}: this server allows {known}", "draft")
        with self._lock:
            plain, spec = self._plain[name], self._specs[name]
        if name == "none":
            if copies:
                reason = "draft='none' drafts nothing, and there is a text to copy from: leave one out"
                raise ApiError(400, reason, "draft")
            return plain
        before = ["grammar"] * constrained + ["input-guided"] * (copies and not plain.takes_references)
        with self._lock:
            spec = "+".join([*before, spec])
            if before and spec not in self._composed:
                self._composed[spec] = registry.load("drafters", spec)
            return self._composed[spec] if before else plain

    @property
    def scores_prompts(self) -> bool:
        """Whether the pass that reads a prompt gives the probabilities of its tokens."""
        return self.fast.target.granularity is not None

    def before_switch(self, prompt: int) -> tuple[int, str] | None:
        """Most tokens behind a prompt, up to the length at which its rotary embeddings change; see `quirks`."""
        return steps_before_switch(self.fast.model.config.get_text_config(decoder=True), prompt)

    def check(self, body: GenerationBody) -> None:
        """Raises ApiError where a parameter has no meaning for this model."""

    def stops(self, prompt: Sequence[int], shown: Shown) -> StoppingCriteria:
        """The criterion that ends a row with a stop string of its output."""
        return StopStrings(shown.text(prompt), len(prompt))

    def encoded(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    @cached_property
    def constraints(self) -> Constraints:
        """The compiler of constraints, made at its first use.

        Raises:
            Refused: it cannot read this tokenizer.
        """
        size = self.fast.target.vocabulary
        return Constraints(self.tokenizer, size, self.end_ids, self.config.max_schema_bytes)

    def remember(self, namespace: str, id: str, tokens: Sequence[int]) -> None:
        """Keep a response as a reference for later requests of its namespace."""
        with self._lock:
            mine = self._responses.setdefault(namespace, OrderedDict())
            mine[id] = array("i", tokens)
            self._remembered[namespace] += len(tokens)
            while len(mine) > RESPONSES or self._remembered[namespace] > RESPONSE_TOKENS:
                self._remembered[namespace] -= len(mine.popitem(last=False)[1])

    def response(self, namespace: str, id: str) -> list[int] | None:
        """The tokens of an earlier response to the same namespace."""
        with self._lock:
            mine = self._responses.get(namespace)
            return None if mine is None or id not in mine else mine[id].tolist()


def longest_of(fast: Accelerated | AcceleratedCanvas, config: ServeConfig) -> int:
    """Most tokens of a request: the setting, by default the model's context.

    Raises:
        Refused: the setting is more than the model has positions for.
    """
    context = fast.target.hard_limit or fast.target.context
    if config.max_model_len is None:
        return context or 4096
    if context is not None and config.max_model_len > context:
        raise Refused(f"max_model_len={config.max_model_len}: the model's context has {context} positions; give fewer")
    return config.max_model_len


def _with_template(tokenizer: PreTrainedTokenizerBase, config: ServeConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, or one with the chat template of the settings."""
    if config.chat_template is None and (tokenizer.chat_template or config.model not in EMBEDDED):
        return tokenizer
    plain = config.chat_template in (None, "plain")
    given = copy.copy(tokenizer)
    given.chat_template = PLAIN_TEMPLATE if plain else _read(Path(str(config.chat_template)))
    return given


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise Refused(f"{path}: {why(e)}") from e
