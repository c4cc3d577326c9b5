"""Drafters, rules and controls from arguments of callers: an instance, a name, or a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft import registry
from truedraft.accept._base import AttributingRule, Rule
from truedraft.canvas.layout import layout_of
from truedraft.drafters._base import Bound, Drafter, Plain
from truedraft.drafters._compose import name_of
from truedraft.drafters._joint import Joint
from truedraft.errors import Refused
from truedraft.loading import tokenizer_of
from truedraft.targets._base import Target
from truedraft.targets.unwrapping import unwrapped
from truedraft.views._base import View

DRAWN = {
    "certain": "certain",
    "one": "drawn one by one",
    "independent": "drawn independently of each other",
    "distinct": "drawn without replacement",
    "last": "certain but for the last of each node",
}


def part(given: Any, kind: str, base: type) -> Any:
    """A drafter, rule or control from an instance or a name.

    Raises:
        Refused: it is neither, or the name is unknown.
    """
    if isinstance(given, str):
        return registry.load(kind, given)
    if isinstance(given, base):
        return given
    argument = registry.KINDS[kind].argument
    raise Refused(f"{argument}={given!r}: give a {base.__name__} or the name of one (`truedraft methods` lists them)")


def drafter_of(
    given: Any, target: Target | None = None, tokenizer: PreTrainedTokenizerBase | None = None, rule: Rule | None = None
) -> Drafter:
    """A drafter from an instance, a name, a draft model, or None for no drafts.

    target, tokenizer, rule: those that it will draft for, on which it depends how a draft model does.
    """
    if given is None:
        return Plain()
    if isinstance(given := unwrapped(given), PreTrainedModel):
        if layout_of(given.config) is not None:
            return registry.load("drafters", "deer", model=given)
        return by_model(given, target, tokenizer, rule)
    return part(given, "drafters", Drafter)


def by_model(
    model: PreTrainedModel, target: Target | None, tokenizer: PreTrainedTokenizerBase | None, rule: Rule | None,
    own: PreTrainedTokenizerBase | None = None, **knobs: Any,
) -> Drafter:  # fmt: skip
    """The drafter by which a model drafts: `draft-model`; or, where it has another tokenizer, `string-level-exact`,
    whose drafts reach further, unless the rule verifies drafts against their distribution.

    own: its tokenizer; by default, where the models have vocabularies of different sizes, that beside its files.
    knobs: of the drafter.
    """
    if own is not None and tokenizer is None:
        raise Refused("assistant_tokenizer was given, and not the model's own: give that to accelerate()")
    if own is None and target is not None and tokenizer is not None:
        size = model.config.get_text_config(decoder=True).vocab_size
        own = None if size == target.vocabulary else tokenizer_of(model)
    if own is None or tokenizer is None or own.get_vocab() == tokenizer.get_vocab():
        return registry.load("drafters", "draft-model", model=model, **knobs)
    exact = (rule is None or rule.guarantee == "tokens") and target is not None and not target.reads_sources
    drafter = registry.load("drafters", "string-level-exact" if exact else "draft-model", model=model, **knobs)
    drafter.own_tokenizer = drafter.tokenizer = own
    return drafter


def view_of(given: Any) -> View:
    """What a model generates under, from an instance or "lossy/NAME".

    Raises:
        Refused: it is neither, or the name is unknown.
    """
    if isinstance(given, str):
        return registry.lossy_view(given)
    if isinstance(given, View):
        return given
    raise Refused(f"view={given!r}: give a View, or lossy/ and the name of one (`truedraft methods` lists them)")


def parts_of(drafters: Sequence[Drafter]) -> list[Drafter]:
    """The drafters and, at any depth, the drafters that they are composed of."""
    return [part for drafter in drafters for part in (drafter, *parts_of(getattr(drafter, "parts", ())))]


def drafting(drafter: Drafter) -> list[Drafter]:
    """The drafters whose drafts are verified: the drafter, or those of its parts if it hands on one of theirs."""
    if isinstance(drafter, Joint) and drafter.alternating:
        return [one for part in drafter.parts for one in drafting(part)]
    return [drafter]


def fitted(drafter: Drafter, target: Target, tokenizer: PreTrainedTokenizerBase | None) -> Drafter:
    """The drafter, bound to this target if it was not, or was bound to another.

    Raises:
        Refused: it cannot draft for this target.
    """
    vocabulary, parts = target.vocabulary, parts_of([drafter])
    if any(part.bound is None or part.bound.target() is not target for part in parts):
        if tokenizer is not None:
            drafter.translate(tokenizer)
        check_vocabulary(drafter, tokenizer, vocabulary)
        if drafter.width:
            target.check_drafts()
        if any(part.bound is not None and part.bound.vocabulary != vocabulary for part in parts):
            drafter.forget()
        drafter.bind(target)
        target.check_taps(drafter.needs)
        drafter.read(tokenizer)
        for part in parts:
            part.bound = Bound(ref(target), vocabulary)
    return drafter


def rule_for(rule: Rule | None, samples: bool, drafter: Drafter) -> Rule:
    """The given rule, by default the one that emits the tokens of `model.generate`.

    samples: `do_sample` of the call.

    Raises:
        Refused: the rule cannot verify the drafter's drafts, or it samples and the call does not, or the reverse.
    """
    rule = rule or registry.load("accept", "seeded" if samples else "greedy")
    for one in drafting(drafter):
        if rule.accepts_draws is not None and one.width and one.draws not in rule.accepts_draws:
            raise Refused(
                f"rule={name_of(rule)!r} cannot verify the drafts of {name_of(one)}, which are {DRAWN[one.draws]}: "
                "use rule='multi-round'"
            )
    if rule.samples != samples:
        does = "samples" if rule.samples else "does not sample"
        raise Refused(f"rule={name_of(rule)!r} {does}, and do_sample is {samples}: change one of them")
    return rule


def check_references(references: Any, drafter: Drafter, rule: Rule | None) -> None:
    """Raises Refused where documents were given that neither drafter nor rule uses."""
    if references is not None and not drafter.takes_references and not isinstance(rule, AttributingRule):
        raise Refused(
            f"references were given, and {name_of(drafter)} does not use any: leave them out, or accelerate with "
            "draft='auto'"
        )


def check_vocabulary(drafter: Drafter, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> None:
    """Raises Refused where a drafter's vocabulary is not the target's."""
    name, own = name_of(drafter), drafter.own_tokens
    sizes = (vocabulary, vocabulary + len(own))
    if drafter.tokenizer is not None and tokenizer is not None:
        mine, others = (
            {token: i for token, i in some.get_vocab().items() if i not in own}
            for some in (drafter.tokenizer, tokenizer)
        )
        if mine != others:
            raise Refused(
                f"the tokenizer of {name} ({len(drafter.tokenizer)} entries) differs from the model's "
                f"({len(tokenizer)}): use a drafter made for this model"
            )
    elif drafter.tokenizer is not None and drafter.vocab_size not in sizes:
        raise Refused(f"{name} has a tokenizer of its own: give accelerate() the model's, so they can be compared")
    elif drafter.vocab_size not in (None, *sizes):
        raise Refused(
            f"{name} has {drafter.vocab_size} tokens, the model {vocabulary}: use a drafter made for this model, or, "
            "if only the padding differs, give accelerate() the tokenizer and the draft model by its name"
        )
