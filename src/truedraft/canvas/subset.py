"""`accelerate(model)` for any-subset models (XLNet): masked positions filled from left to right, several per pass."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.call.surroundings import defaults, exclusive
from truedraft.canvas._base import Canvas, CanvasRow
from truedraft.canvas.accelerated import Hooks, output, part
from truedraft.canvas.hosting import check_logits, failed_pass
from truedraft.canvas.layout import Layout
from truedraft.canvas.predicting import Chooser
from truedraft.canvas.settings import Settings, prompts_of, settings_of
from truedraft.canvas.subsets._base import SubsetDrafter
from truedraft.card import method_name
from truedraft.errors import Refused
from truedraft.standin import StandIn
from truedraft.stats import Emission, Pass, Report
from truedraft.stopwatch import Stopwatch
from truedraft.targets.hostable import check_runtime

READS = {"perm_mask", "target_mapping"}  # arguments of the forward of such a model
DRAFTER = "assd"
STEP = 0  # whose noise all positions have: one position is chosen once


def reads_subsets(model: Any) -> bool:
    """Whether a language model reads any subset of a text, by a permutation mask."""
    return (
        isinstance(model, PreTrainedModel)
        and inspect.signature(model.forward).parameters.keys() >= READS
        and model.can_generate()
    )


class SubsetTarget:
    """Passes of an any-subset model.

    A position has a rank: 0 where the text is given, else its place among the masked ones, from 1. Given tokens read
    each other; a token at a masked position reads those of lower ranks and itself, and the query of a position those of
    lower ranks. What a token reads never changes, so one pass has the conditionals of many, each as if predicted alone.
    """

    reads_sources = False
    context = hard_limit = None
    runtime = "transformers forward"

    def __init__(self, model: Any, mask: int):
        self.model, self.mask = model, mask
        self.vocabulary: int = model.config.get_text_config(decoder=True).vocab_size

    def score(
        self, tokens: Sequence[int], ranks: Sequence[int], draft: Sequence[int], queries: Sequence[int]
    ) -> Tensor:
        """(n, V) fp32 logits, without the mask token, which is no text.

        Args:
            tokens: the canvas. ranks: of its positions.
            draft: tokens at the first of the queries.
            queries: the first n masked positions: those of the draft read what is drafted before them, those behind it
                all of the draft, and not each other.
        """
        given = max(position for position, rank in enumerate(ranks) if not rank)
        length = max(given, queries[-1]) + 1
        behind = ranks[queries[0]] + len(draft)
        ids, device = torch.tensor([tokens[:length]]), self.model.device
        ids[0, list(queries[: len(draft)])] = torch.tensor(draft, dtype=ids.dtype)
        rank = torch.tensor(ranks[:length]).clamp(max=behind)
        hidden = (rank[None] >= rank[:, None]) & ((rank[None] > 0) | (rank[:, None] > 0))
        targets = torch.nn.functional.one_hot(torch.tensor(queries), length)
        logits = self.model(
            ids.to(device), perm_mask=hidden[None].to(device, self.model.dtype),
            target_mapping=targets[None].to(device, self.model.dtype), use_mems=False,
        ).logits[0].float()  # fmt: skip
        logits[:, self.mask] = -torch.inf
        return logits


def one_at_a_time(
    target: SubsetTarget, tokens: Sequence[int], known: Sequence[bool], chooser: Chooser, index: int = 0
) -> tuple[list[int], Tensor]:
    """The reference, plainly: one pass per masked position, which reads given tokens and those filled before it.

    index: of the row, for its noise.

    Returns:
        The canvas without masks, and the (masks, V) logits that its tokens were chosen by.
    """
    canvas, ranks, logits = list(tokens), ranks_of(known), list[Tensor]()
    for position in (i for i, given in enumerate(known) if not given):
        logits.append(target.score(canvas, ranks, [], [position]))
        [found] = chooser.predictions(logits[-1], index, [STEP], [[position]], [range(len(canvas))])
        canvas[position] = found.tokens[0]
    return canvas, torch.cat(logits)


def ranks_of(known: Sequence[bool]) -> list[int]:
    """The ranks of positions; see `SubsetTarget`."""
    ranks, count = [], 0
    for given in known:
        count += not given
        ranks.append(0 if given else count)
    return ranks


class AcceleratedSubset(StandIn):
    """An any-subset model with a `generate` that fills masks; made by `accelerate`. Other attributes are the model's.

    Attributes:
        model: the model that was given, unchanged.
        target: its passes.
        method: what drafts; None for one token per pass.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, draft: Any = "auto",
        rule: Any = None, runtime: str = "auto", strict: bool = False, layout: Any = None, view: Any = None,
    ):  # fmt: skip
        name = type(model).__name__
        for argument, value in {"rule": rule, "layout": layout, "view": view}.items():
            if value is not None:
                raise Refused(f"{argument}={value!r} is not for {name}, an any-subset model: leave it out")
        check_runtime(runtime)
        if strict:
            raise Refused(f"strict=True: passes are the forward of {name}, which rounds by their width; leave it out")
        self.model, self.tokenizer = model, tokenizer
        self.method: SubsetDrafter | None = None
        if draft is not None and draft != "none":
            self.method = part(DRAFTER if draft == "auto" else draft, "canvas.subsets", SubsetDrafter)
        self.target = SubsetTarget(model, _checked(model, tokenizer))
        with defaults():
            _check(self.target)
        self._complete()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {type(self.model).__name__}: {self.model.num_parameters():,} parameters; drafter "
            f"{self._drafter}>"
        )

    @property
    def _drafter(self) -> str:
        return "none" if self.method is None else method_name(self.method)

    def generate(
        self, inputs: Tensor | None = None, *, attention_mask: Tensor | None = None, streamer: Any = None,
        on_pass: Callable[[Pass], None] | None = None, on_read: Callable[[int, int], None] | None = None,
        on_canvas: Callable[[list[CanvasRow]], None] | None = None, references: Any = None, **given: Any,
    ) -> Tensor:  # fmt: skip
        """The text of filling one masked position after another, from left to right, in fewer passes.

        Rows are filled one after another.

        Args:
            inputs: (batch, length) ids with mask tokens anywhere, at least one other token in each row; left-padded
                batches with their `attention_mask`.
            streamer: of `transformers`, for one prompt without masks.
            on_pass, on_read, on_canvas: as of diffusion models.
            **given: `generation_config`, its fields where they have a meaning for single positions, and `seed`. So many
                masks as `max_new_tokens` stand behind each row, at 0 none; a text ends with the first end token there.

        Returns:
            (batch, length) token ids: inputs with their masks filled, and new tokens, padded at the right.

        Raises:
            Refused: a setting that cannot be honoured, named before anything is computed.
        """
        inputs = given.pop("input_ids", None) if inputs is None else inputs
        with exclusive([self]), defaults(), self._reporting(), torch.no_grad():
            if references is not None:
                raise Refused("references are for autoregressive models: leave them out for an any-subset model")
            _checked(self.model, self.tokenizer)
            prompts = prompts_of(inputs, attention_mask, None, self.target.vocabulary)
            settings = _settings(self.model, self.target.mask, max(map(len, prompts)), given)
            rows = [
                _row(prompt, settings, i * settings.count + j)
                for i, prompt in enumerate(prompts)
                for j in range(settings.count)
            ]
            if streamer is not None and (len(rows) > 1 or self.target.mask in prompts[0]):
                raise Refused("streamer: one text whose prompt has no masks can be streamed; leave it out")
            self._decode(rows, settings.chooser, Hooks(streamer, on_pass, on_read, on_canvas))
            assert inputs is not None
            filled = inputs.repeat_interleave(settings.count, 0)
            for line, row in zip(filled, rows, strict=True):
                line[len(line) - row.prompt :] = torch.tensor(row.canvas.tokens[: row.prompt])
            return output(filled, rows, replace(settings, count=1))

    def _decode(self, rows: list[CanvasRow], chooser: Chooser, hooks: Hooks) -> None:
        watch = Stopwatch()
        dtype = str(self.model.dtype).removeprefix("torch.")
        self._report = report = Report(
            self._drafter, "left-to-right", "tokens", "none", self.target.runtime, dtype=dtype, seconds=watch.seconds,
            reference=f"one masked position per pass, from left to right, up to ties of {dtype}",
        )  # fmt: skip
        score = watch.timed("target", self.target.score)
        advance = watch.timed_steps(lambda filling: next(filling, None))
        try:
            hooks.read(rows)
            for row in rows:
                filling = fill(row, score, self.method, chooser)
                while (done := advance(filling)) is not None:
                    report.passes.append(done)
                    hooks.passed(done, rows)
        finally:
            hooks.end()

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedSubset:
        """A deep copy of the model, accelerated in the same way."""
        copied = AcceleratedSubset(copy.deepcopy(self.model, memo), self.tokenizer, copy.copy(self.method))
        memo[id(self)] = copied
        return copied


def fill(
    row: CanvasRow, score: Callable[..., Tensor], method: SubsetDrafter | None, chooser: Chooser
) -> Iterator[Pass]:
    """Fill the masks of a row up to the end of its text; yields each pass."""
    canvas, ranks, chosen = row.canvas, ranks_of(row.canvas.known), dict[int, int]()
    while not row.ended and (masks := canvas.masked(row.block)):
        draft = [] if method is None else method.draft(canvas, masks, chosen)[: len(masks)]
        queries = masks[: len(draft) + 1 + (0 if method is None else method.ahead)]
        logits = score(canvas.tokens, ranks, draft, queries)
        [found] = chooser.predictions(logits, row.index, [STEP], [queries], [row.block])
        agreed = 0
        while agreed < len(draft) and draft[agreed] == found.tokens[agreed]:
            agreed += 1
        fixed = queries[: agreed + 1]
        canvas.fix(found.fix(range(len(fixed))))
        chosen = dict(zip(queries[len(fixed) :], found.tokens[len(fixed) :], strict=True))
        inside = tuple(canvas.tokens[i] for i in fixed if i < row.prompt)
        emitted = inside + row.emit()
        yield Pass(len(queries), (Emission(row.index, emitted, min(agreed, len(emitted)), len(draft)),))


def _checked(model: Any, tokenizer: Any) -> int:
    """The mask token of a model; raises Refused where it cannot be hosted."""
    name = type(model).__name__
    if not reads_subsets(model):
        raise Refused(f"{name} is no any-subset model: it has no forward with perm_mask and target_mapping, or no head")
    if model.training:
        raise Refused(f"{name} is in training mode, where dropout makes the text random: call model.eval() first")
    if getattr(model.config, "attn_type", "bi") != "bi":
        raise Refused(f"{name} reads earlier positions only (attn_type): an any-subset model reads both sides")
    if getattr(model.config, "bi_data", False):
        raise Refused(f"{name} reads rows in pairs (bi_data), and rows are filled one by one: set it to False")
    mask = getattr(model.config, "mask_token_id", None)
    mask = getattr(tokenizer, "mask_token_id", None) if mask is None else mask
    size = model.config.get_text_config(decoder=True).vocab_size
    if mask is None or not 0 <= mask < size:
        what = "no mask token" if mask is None else f"a mask token {mask} outside its vocabulary of {size}"
        raise Refused(f"{name} has {what}: set config.mask_token_id, or give its tokenizer, with one")
    return int(mask)


@torch.no_grad()
def _check(target: SubsetTarget) -> None:
    """Compare one pass over a draft with passes over one position each; raises Refused where they differ."""
    words = [token for token in range(min(target.vocabulary, 16)) if token != target.mask]
    known = [False, True, True, False, False, True, False, False]
    canvas = [words[i % len(words)] if given else target.mask for i, given in enumerate(known)]
    masks, ranks = [i for i, given in enumerate(known) if not given], ranks_of(known)
    try:
        filled, expected = one_at_a_time(target, canvas, known, Chooser([]))  # type: ignore[arg-type]
        found = target.score(canvas, ranks, [filled[i] for i in masks[:-1]], masks)
    except (RuntimeError, ValueError, TypeError) as error:
        plain = {weight.dtype for weight in target.model.parameters()} == {torch.float32}
        hint = "" if plain else ": load it in float32 (--dtype float32)"
        raise Refused(f"{failed_pass(target.model, error)}{hint}") from error
    kept = [token for token in range(target.vocabulary) if token != target.mask]
    what = "a pass over a draft differs from passes over single positions"
    check_logits(target.model, found[:, kept], expected[:, kept], what)


def _settings(model: Any, mask: int, prompt: int, given: Mapping[str, Any]) -> Settings:
    """The settings of a call; raises Refused as `settings_of`, and for what any-subset models do not have."""
    for name in ("block_length", "steps", "stop_strings"):
        if given.get(name) is not None:
            raise Refused(f"{name}={given[name]!r} is not supported for any-subset models: leave it out")
    none = given.get("max_new_tokens") == 0 and not isinstance(given["max_new_tokens"], bool)
    settings = settings_of(model, Layout(mask), prompt, {**given, "max_new_tokens": 1} if none else given)
    if settings.stops:
        raise Refused("stop_strings and stopping criteria are not supported for any-subset models: leave them out")
    return replace(settings, new=0) if none else settings


def _row(prompt: list[int], settings: Settings, index: int) -> CanvasRow:
    """A row with its masks.

    Raises:
        Refused: nothing but masks, which leaves nothing to read.
    """
    mask = settings.layout.mask
    canvas = Canvas.behind(prompt, mask, len(prompt) + settings.new)
    canvas.known = [token != mask for token in canvas.tokens]
    if not any(canvas.known):
        raise Refused(f"row {index // settings.count} has nothing but masks: give at least one token to read")
    return CanvasRow(index, canvas, len(prompt), [range(len(canvas))], settings.ends, settings.new)
