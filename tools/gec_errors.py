"""Insertion of typical errors into sentences: the training data of `nano-gec`, which corrects them.

Every kind of error has a weight, and a sentence has a number of errors drawn from its own rate, so that many have none
or one, and a few as many as those of a learner. Misspellings are real ones where a list of them is given; inflected
forms are from a dictionary (`lemminflect`), never from rules over letters.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import lemminflect

PIECES = re.compile(r"\s+|[A-Za-z]+(?:['’][A-Za-z]+)*|\d+(?:[.,]\d+)*|.", re.DOTALL)
WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)*")
ARTICLES = ("a", "an", "the")
PREPOSITIONS = {
    "in": "on at to of into for with",
    "on": "in at of about to upon for",
    "at": "in on to for with",
    "to": "for at in on into of with",
    "for": "to of in with on from about",
    "of": "in for from on with about to",
    "with": "by to in of for from",
    "by": "with from in on of",
    "from": "of in by to at for",
    "about": "of on for in to",
    "into": "in to on at",
    "during": "in on at for",
    "between": "among in of",
    "among": "between in of",
    "since": "for from during",
    "until": "to by till",
    "over": "on above in",
    "through": "by in with",
    "against": "to with for",
    "towards": "to for in",
}
FORMS = [
    "is are was were be been am being",
    "has have had having",
    "does do did done doing",
    "this these",
    "that those",
    "much many",
    "less fewer",
    "he him his",
    "she her hers",
    "they them their",
    "we us our",
    "I me my",
    "it its it's",
    "there their they're",
    "your you're you",
    "then than",
    "to too two",
    "who which that whom whose",
    "who's whose",
    "lose loose",
    "affect effect",
    "advice advise",
    "accept except",
    "quite quiet quit",
    "our are hour",
    "where were we're",
    "here hear",
    "know now no",
    "new knew",
    "by buy bye",
    "weather whether",
    "piece peace",
    "live life leave",
    "its it's",
    "other others another",
    "every all each",
    "some any",
    "good well",
    "like as",
    "because cause",
    "so such",
    "also too",
    "can could may might",
    "will would",
    "should must",
    "make do",
    "say tell",
    "think thing",
    "people peoples person",
    "child children childs",
    "woman women",
    "man men",
    "more most",
    "if weather",
    "of off have",
    "threw through",
    "passed past",
    "principal principle",
    "believe belief",
    "choose chose choice",
    "economic economical",
    "everyday every",
    "may maybe",
    "sometime sometimes",
    "beside besides",
    "hard hardly",
    "high highly",
    "first firstly",
    "whole hole",
    "right write",
    "meet meat",
    "see sea",
    "bad badly",
    "fun funny",
    "look watch see",
    "anything nothing something",
    "anyone someone everyone",
]
DROPPED = (
    *("that", "it", "to", "be", "is", "are", "was", "have", "has", "had", "do", "will", "would", "can", "and", "or"),
    *("they", "he", "she", "we", "you", "I", "there", "which", "who", "also"),
)
INSERTED = ("the", "a", "of", "to", "in", "that", "is", "it", "and", "for", "also", "very", "more", "have", "be")
NEAR = {
    c: near
    for row in ("qwertyuiop", "asdfghjkl", "zxcvbnm")
    for c, near in zip(row, (row[max(0, i - 1) : i + 2].replace(row[i], "") for i in range(len(row))), strict=True)
}
SOUNDS = [
    ("ie", "ei"), ("ei", "ie"), ("ph", "f"), ("ck", "k"), ("c", "s"), ("s", "c"), ("c", "k"), ("tion", "sion"),
    ("sion", "tion"), ("ough", "ou"), ("ai", "ei"), ("ea", "ee"), ("ee", "ea"), ("ee", "i"), ("ou", "o"),
    ("oo", "u"), ("a", "e"), ("e", "a"), ("e", "i"), ("i", "e"), ("i", "y"), ("y", "i"), ("o", "u"), ("u", "o"),
    ("a", "u"), ("o", "a"), ("er", "or"), ("or", "er"), ("er", "ar"), ("ance", "ence"), ("ence", "ance"),
    ("ant", "ent"), ("ent", "ant"), ("able", "ible"), ("ible", "able"), ("sc", "s"), ("ch", "c"), ("th", "t"),
    ("wh", "w"), ("gh", "g"), ("kn", "n"), ("ly", "lly"), ("z", "s"), ("s", "z"), ("j", "g"), ("g", "j"),
    ("v", "f"), ("qu", "k"), ("x", "ks"), ("ed", "d"), ("ies", "ys"), ("ful", "full"), ("al", "el"), ("el", "al"),
    ("ous", "us"), ("our", "or"), ("tch", "ch"), ("dge", "ge"),
]  # fmt: skip


@lru_cache(maxsize=200_000)
def forms(word: str) -> tuple[str, ...]:
    """Other inflected forms of a word, for every part of speech that it has in the dictionary."""
    found: set[str] = set()
    for part, lemmas in lemminflect.getAllLemmas(word).items():
        if part in ("NOUN", "VERB", "ADJ", "ADV", "AUX"):
            for lemma in lemmas:
                for spelt in lemminflect.getAllInflections(lemma, upos=part).values():
                    found.update(spelt)
    return tuple(sorted(w for w in found - {word} if WORD.fullmatch(w)))


@lru_cache(maxsize=200_000)
def is_noun(word: str) -> bool:
    return word.islower() and "NOUN" in lemminflect.getAllLemmas(word)


def like(old: str, new: str) -> str:
    """`new`, capitalised as `old`."""
    return new[:1].upper() + new[1:] if old[:1].isupper() and not (old == "I" and new != "I") else new


@dataclass
class Errors:
    """Inserts errors into sentences.

    `misspelt` maps a right word to real misspellings of it; see `misspellings`.
    """

    misspelt: dict[str, list[str]]
    confused: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        table: dict[str, set[str]] = defaultdict(set)
        for line in FORMS:
            words = line.split()
            for w in words:
                table[w].update(x for x in words if x != w)
        self.confused = {w: sorted(others) for w, others in table.items()}
        kinds: list[tuple[float, Callable[[list[str], random.Random], bool]]] = [
            (26, self.spelling),
            (15, self.inflection),
            (7, self.confusion),
            (8, self.article_lost),
            (5, self.article_gained),
            (3, self.article_swapped),
            (8, self.preposition),
            (3, self.preposition_lost),
            (4, self.lost),
            (3, self.gained),
            (1.5, self.doubled),
            (3, self.order),
            (6, self.comma),
            (2, self.end),
            (3.5, self.capital),
            (2, self.apostrophe),
            (2.5, self.joined),
        ]
        self.weights = [w for w, _ in kinds]
        self.kinds = [kind for _, kind in kinds]

    def hurt(self, sentence: str, rng: random.Random) -> str:
        """The sentence with errors: none in one of seven, and otherwise one in twenty words to one in four."""
        if rng.random() < 0.14:
            return sentence
        pieces = PIECES.findall(sentence)
        words = sum(1 for p in pieces if WORD.fullmatch(p))
        rate = rng.choice([0.05, 0.08, 0.12, 0.16, 0.25])
        errors = max(1, sum(rng.random() < rate for _ in range(words)))
        for _ in range(3 * errors):
            if errors and rng.choices(self.kinds, self.weights)[0](pieces, rng):
                errors -= 1
                pieces = PIECES.findall("".join(pieces))
        return "".join(pieces)

    # ------------------------------------------------ kinds; each returns whether it found a place

    @staticmethod
    def _one(pieces: list[str], rng: random.Random, fits: Callable[[str], object]) -> int | None:
        found = [i for i, p in enumerate(pieces) if p[0].isalpha() and fits(p)]
        return rng.choice(found) if found else None

    def spelling(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._one(pieces, rng, lambda w: len(w) > 3 or (len(w) == 3 and rng.random() < 0.2))
        if i is None:
            return False
        word = pieces[i]
        listed = self.misspelt.get(word.lower())
        if listed and rng.random() < 0.5:
            pieces[i] = like(word, rng.choice(listed))
        else:
            pieces[i] = self.misspell(word, rng)
            if len(word) > 7 and rng.random() < 0.15:
                pieces[i] = self.misspell(pieces[i], rng)
        return pieces[i] != word

    def misspell(self, word: str, rng: random.Random) -> str:
        """One typing error, or one letter replaced by another of the same sound."""
        if rng.random() < 0.4:
            low = word.lower()
            fitting = [(a, b, low.find(a, 1)) for a, b in SOUNDS if low.find(a, 1) > 0]
            if fitting:
                a, b, at = rng.choice(fitting)
                return word[:at] + b + word[at + len(a) :]
        i = rng.randrange(1, len(word))
        doubles = [k for k in range(1, len(word)) if word[k] == word[k - 1]]
        kind = rng.choices(["drop", "swap", "double", "single", "near", "insert", "end"], [28, 16, 12, 14, 12, 10, 8])[
            0
        ]
        if kind == "single" and doubles:
            i = rng.choice(doubles)
            return word[:i] + word[i + 1 :]
        if kind == "swap" and i + 1 < len(word):
            return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
        if kind == "double":
            return word[:i] + word[i] + word[i:]
        if kind == "near" and word[i] in NEAR:
            return word[:i] + rng.choice(NEAR[word[i]]) + word[i + 1 :]
        if kind == "insert":
            return word[:i] + rng.choice("aeiounrstlhe") + word[i:]
        if kind == "end" and len(word) > 4:
            return word + "e" if word[-1] != "e" else word[:-1]
        return word[:i] + word[i + 1 :]

    def inflection(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._one(pieces, rng, lambda w: len(w) > 2 and forms(w.lower()))
        if i is None:
            return False
        pieces[i] = like(pieces[i], rng.choice(forms(pieces[i].lower())))
        return True

    def confusion(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._one(pieces, rng, lambda w: w in self.confused or w.lower() in self.confused)
        if i is None:
            return False
        word = pieces[i]
        pieces[i] = like(word, rng.choice(self.confused.get(word) or self.confused[word.lower()]))
        return True

    def _remove(self, pieces: list[str], i: int) -> None:
        first = pieces[i][:1].isupper() and pieces[i] != "I"
        del pieces[i : i + 2]
        if first and i < len(pieces):
            pieces[i] = pieces[i][:1].upper() + pieces[i][1:]

    def _removable(self, pieces: list[str], rng: random.Random, words: object) -> int | None:
        found = [i for i, p in enumerate(pieces[:-2]) if p.lower() in words and pieces[i + 1] == " "]  # type: ignore[operator]
        return rng.choice(found) if found else None

    def article_lost(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._removable(pieces, rng, ARTICLES)
        if i is not None:
            self._remove(pieces, i)
        return i is not None

    def article_gained(self, pieces: list[str], rng: random.Random) -> bool:
        places = [i for i, p in enumerate(pieces) if i > 1 and is_noun(p) and pieces[i - 2].lower() not in ARTICLES]
        if not places:
            return False
        i = rng.choice(places)
        pieces[i:i] = ["the" if rng.random() < 0.75 else ("an" if pieces[i][0] in "aeiou" else "a"), " "]
        return True

    def article_swapped(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._one(pieces, rng, lambda w: w.lower() in ARTICLES)
        if i is None:
            return False
        pieces[i] = like(pieces[i], rng.choice([a for a in ARTICLES if a != pieces[i].lower()]))
        return True

    def preposition(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._one(pieces, rng, lambda w: w.lower() in PREPOSITIONS)
        if i is None:
            return False
        pieces[i] = like(pieces[i], rng.choice(PREPOSITIONS[pieces[i].lower()].split()))
        return True

    def preposition_lost(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._removable(pieces, rng, PREPOSITIONS)
        if i is not None:
            self._remove(pieces, i)
        return i is not None

    def lost(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._removable(pieces, rng, DROPPED)
        if i is not None:
            self._remove(pieces, i)
        return i is not None

    def gained(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._one(pieces[1:], rng, lambda w: len(w) > 1)
        if i is None:
            return False
        pieces[i + 1 : i + 1] = [rng.choice(INSERTED), " "]
        return True

    def doubled(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._one(pieces, rng, lambda w: len(w) < 6)
        if i is None:
            return False
        pieces[i:i] = [pieces[i], " "]
        return True

    def order(self, pieces: list[str], rng: random.Random) -> bool:
        found = [
            i
            for i in range(len(pieces) - 2)
            if pieces[i + 1] == " " and pieces[i][0].isalpha() and pieces[i + 2][0].isalpha()
        ]
        if not found:
            return False
        i = rng.choice(found)
        a, b = pieces[i], pieces[i + 2]
        if i == 0 and a != "I":
            a, b = a[:1].lower() + a[1:], b[:1].upper() + b[1:]
        pieces[i], pieces[i + 2] = b, a
        return True

    def comma(self, pieces: list[str], rng: random.Random) -> bool:
        commas = [i for i, p in enumerate(pieces) if p == "," and 0 < i < len(pieces) - 1]
        if commas and rng.random() < 0.75:
            i = rng.choice(commas)
            if pieces[i - 1] == " ":
                del pieces[i - 1]
                i -= 1
            if rng.random() < 0.12:
                pieces[i] = "." if rng.random() < 0.5 else ";"
            else:
                del pieces[i]
            return True
        spaces = [i for i, p in enumerate(pieces) if p == " " and i + 1 < len(pieces) and pieces[i - 1][-1].isalpha()]
        if not spaces:
            return False
        i = rng.choice(spaces)
        tokenized = any(p in ".?!" and pieces[k - 1] == " " for k, p in enumerate(pieces) if k)
        pieces[i:i] = [" ", ","] if tokenized else [","]
        return True

    def end(self, pieces: list[str], rng: random.Random) -> bool:
        if pieces[-1] not in ".?!" or len(pieces) < 4:
            return False
        del pieces[-1]
        if pieces[-1] == " ":
            del pieces[-1]
        return True

    def capital(self, pieces: list[str], rng: random.Random) -> bool:
        upper = [i for i, p in enumerate(pieces) if p[0].isupper()]
        if upper and rng.random() < 0.85:
            i = rng.choice(upper)
            pieces[i] = pieces[i][0].lower() + pieces[i][1:]
            return True
        i = self._one(pieces, rng, lambda w: w[0].islower() and len(w) > 3)
        if i is None:
            return False
        pieces[i] = pieces[i][0].upper() + pieces[i][1:]
        return True

    def apostrophe(self, pieces: list[str], rng: random.Random) -> bool:
        i = self._one(pieces, rng, lambda w: "'" in w or "’" in w)
        if i is None:
            i = self._one(pieces, rng, lambda w: w.endswith("s") and len(w) > 3)
            if i is None:
                return False
            pieces[i] = pieces[i][:-1] + "'s"
            return True
        pieces[i] = pieces[i].replace("'", "").replace("’", "")
        return True

    def joined(self, pieces: list[str], rng: random.Random) -> bool:
        spaces = [
            i
            for i in range(1, len(pieces) - 1)
            if pieces[i] == " " and pieces[i - 1][-1].isalpha() and pieces[i + 1][0].isalpha()
        ]
        if spaces and rng.random() < 0.7:
            del pieces[rng.choice(spaces)]
            return True
        i = self._one(pieces, rng, lambda w: len(w) > 5 and w.isalpha())
        if i is None:
            return False
        at = rng.randrange(2, len(pieces[i]) - 2)
        pieces[i] = pieces[i][:at] + " " + pieces[i][at:]
        return True


def misspellings(path: Path, words: set[str]) -> dict[str, list[str]]:
    """Right word -> its misspellings, from lines `wrong->right` (codespell's dictionary), for `words`."""
    table: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        wrong, _, right = line.partition("->")
        first = right.split(",")[0].strip()
        if first in words and WORD.fullmatch(wrong):
            table[first].append(wrong)
    return dict(table)
