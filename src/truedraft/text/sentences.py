"""Where sentences end, with the white space between them kept as it is.

In doubt a sentence continues: models read two sentences in one well, but not halves of one.
"""

from __future__ import annotations

import re

OPENING, CLOSING = "\"'“‘«([{¿¡", "\"'”’»)]}"
END = re.compile(
    rf"(?<![.!?…])(?P<mark>[.!?…]+)[{re.escape(CLOSING)}]*(?P<gap>\s+)(?=[{re.escape(OPENING)}]*(?P<next>[^\W_]))"
    rf"|(?<![。！？])[。！？]+[{re.escape(CLOSING)}」』）]*(?P<tight>\s*)(?=\S)"
)
LONGEST = 400  # characters within which an open quotation or bracket prevents an end
# What a full stop may follow without ending the sentence, before a word with a capital; and before a number only.
TITLES = "mr mrs ms mx dr prof rev hon st jr sr gen col maj capt lt sgt gov sen rep pres messrs mme mlle fr"
TERMS = "vs etc al cf ca approx dept est inc ltd co corp bros ave blvd rd mt ft trans op cit ibid bzw ing str usw vgl"
DATES = "jan feb apr jun jul aug sep sept oct nov dec tue tues thu thurs fri"
NUMBERED = "no nos nr p pp fig figs eq eqs sec secs art ch chap vol vols ed eds"
ABBREVIATIONS = frozenset(f"{TITLES} {TERMS} {DATES}".split())
BEFORE_NUMBERS = frozenset(NUMBERED.split())
SPEECH = re.compile(r"\w+(?: \w+)? (?:said|says|asked|replied|cried|shouted|answered|whispered|thought|added|called)\b")


def split(text: str) -> list[str]:
    """Sentences and the white space between them, in turns: the first and the last are sentences, all join to `text`.

    Args:
        text: without white space at either end.
    """
    parts: list[str] = []
    start = 0
    for found in END.finditer(text):
        gap = "gap" if found["gap"] is not None else "tight"
        if gap == "tight" or _ends(text, start, found):
            parts += [text[start : found.start(gap)], found[gap]]
            start = found.end()
    return [*parts, text[start:]]


def _ends(text: str, start: int, found: re.Match[str]) -> bool:
    """Whether the sentence that began at `start` ends with this mark."""
    mark, following = found["mark"], found["next"]
    if following.islower() or "…" in mark or mark.endswith(".."):
        return False
    before = text[max(start, found.start("gap") - LONGEST) : found.start("gap")]
    following_text = text[found.start("next") : found.start("next") + 40]
    quoted = before[-1] in CLOSING and mark != "." and SPEECH.match(following_text)
    if len(before) < LONGEST and (_open(before) or quoted):
        return False
    if mark != ".":
        return True
    word = re.split(rf"[\s{re.escape(OPENING)}]", before.rstrip(CLOSING).removesuffix("."))[-1]
    if following.isdigit() and word.lower() in BEFORE_NUMBERS:
        return False
    numeral = word.isdigit() and word == before.strip(OPENING + ".")  # "1. Introduction"
    initials = "." in word or (len(word) == 1 and word.isalpha() and word.isupper())
    return not (numeral or initials or word.lower() in ABBREVIATIONS)


def _open(text: str) -> bool:
    return bool(text.count('"') % 2) or any(text.count(a) > text.count(b) for a, b in ("“”", "«»", "()", "[]"))
