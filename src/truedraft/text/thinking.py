"""Whether, and how much, a model reasons: what a request asks for, as the variables that a chat template reads.

Templates have a switch (`enable_thinking` of Qwen and others, `thinking` of DeepSeek), an effort of their own
(`reasoning_effort` of gpt-oss), both, or neither. OpenAI's API has the effort, whose "none" is no reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError

from truedraft.errors import Refused

EFFORT = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")
NONE = "none"
TAGS = re.compile(r"think(ing)?\s*[>▷]|THINK\]|<\|channel")  # that templates of models which reason contain


@lru_cache(maxsize=64)
def variables(template: str) -> frozenset[str]:
    """The names in the statements and expressions of a chat template, attributes excluded."""
    names, before = set(), ""
    try:
        for _, kind, text in Environment().lex(template):
            if kind == "name" and before != ".":
                names.add(text)
            before = before if kind == "whitespace" else text
    except TemplateError:  # which is what its use will report
        return frozenset()
    return frozenset(names)


def with_reasoning(template: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for a template, those about reasoning under the names that this template reads.

    A switch is turned off by an effort of "none", and on by any other. What a template cannot express is left out where
    nothing would change: a model reasons as it does, unless it is asked not to.

    Raises:
        Refused: the model is asked not to reason and its template cannot tell it, or two values contradict each other.
    """
    read = variables(template)
    found = {name: value for name, value in values.items() if name in read or name not in (EFFORT, *SWITCHES)}
    for name in (EFFORT, *SWITCHES):
        value = values.get(name)
        if value is None or (name in read and value != NONE):
            continue
        reasons = value not in (False, NONE)
        switch = next((switch for switch in SWITCHES if switch in read), None)
        if switch is not None:
            if found.setdefault(switch, reasons) != reasons:
                raise Refused(f"{name}={value!r} contradicts {switch}={found[switch]!r}: give one of them")
        elif not reasons and name not in read and (EFFORT in read or TAGS.search(template)):
            remedy = "give a low reasoning_effort" if EFFORT in read else "leave it out"
            raise Refused(f"{name}={value!r}: this model always reasons, as its chat template has no switch; {remedy}")
    return found
