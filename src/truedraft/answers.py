"""Answers to names that a kind of methods does not have: where the name belongs, what there is here for the paper of
that name, or the nearest names.

Names of papers and of other projects are declared by the cards of the methods that cover them (`Card.also`). This file
has papers that no method covers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache

from truedraft import registry
from truedraft.errors import Refused

NEAR, SURE = 0.6, 0.75  # similarity of a name that is suggested: of one of this kind, and of any other
MOST = 3  # names that are suggested
SELECTING = "draft='top-kv' drafts from the entries with the most attention, and view='lossy/top-kv' generates so"
PARALLEL = "draft='medusa:FOLDER' and draft='hydra:FOLDER' are the nearest"
MASKS = "draft='s3d:FOLDER', whose masks are trained, is the nearest"
IMAGES = "prompts of images are not drafted for"
OF_IMAGES = "images are not generated"
LAYOUT = "heads of this layout are not read; `truedraft train eagle3` trains one"
# Papers that the engine or a command covers, and no method
ELSEWHERE: Mapping[str, str] = {
    "eqspec": "batches of different lengths are exact with every drafter, without padding",
    "exspec": "batches of different lengths are exact with every drafter, and rows come and go in a running engine",
    "bass": "batches of different lengths are exact with every drafter, without padding",
    "online-speculative-decoding": "`truedraft serve --record FILE --train FOLDER` trains the drafter while it serves",
    "specmemo": "`truedraft plan` predicts the memory of a model, a draft model and their drafts",
    "respec": "`truedraft serve --record FILE` keeps what is answered, and `truedraft train --weights reward` trains a "
    "drafter on it by rewards; the reinforcement learning itself is not here",
    "decoding-sd": "`truedraft shapes` finds the shape of a draft model that pays",
}
# Papers and projects that nothing here covers -> what is nearest, or why there is nothing
UNCOVERED: Mapping[str, str] = {
    "hydragen": "a running engine keeps prefixes of prompts, and computes attention to them row by row",
    "rapid": "", "easyspec": "", "autojudge": "rule='lossy/typical' and rule='lossy/reflective' are the nearest",
    "longspec": "draft='glide:FOLDER', which reads the target's keys and values, is the nearest",
    "moa-spec": "draft='glide:FOLDER', which reads the target's keys and values, is the nearest",
    "hidden-transfer": PARALLEL, "chimera": PARALLEL, "amphista": PARALLEL, "clover": PARALLEL, "falcon": PARALLEL,
    "redrafter": LAYOUT, "griffin": LAYOUT, "p-eagle": LAYOUT, "dspark": LAYOUT, "domino": LAYOUT, "pard-2": LAYOUT,
    "arctic-lstm": LAYOUT, "uno": LAYOUT, "coral": "draft='eagle3:FOLDER' is the nearest",
    "confu": "draft='eagle3:FOLDER' is the nearest",
    "bita": MASKS, "ppd": MASKS, "space": MASKS, "lud": MASKS,
    "cllm": "draft='lookahead' is the nearest", "fastcot": "draft='lookahead' is the nearest",
    "llm-to-slm": "", "scd": "", "speculative-contrastive-decoding": "", "superposed-decoding": "",
    "first-finish-search": "a stopping criterion of generate can end a group of rows",
    "clusterkv": SELECTING, "gemfilter": SELECTING, "fastkv": SELECTING, "speckv": SELECTING, "specpc": SELECTING,
    "double-sparsity": SELECTING, "lserve": SELECTING, "subgen": SELECTING, "sampleattention": "",
    "gear": "draft='int4-kv' rounds keys and values to four bits", "spherical-kv": "draft='int4-kv' is the nearest",
    "specvlm": IMAGES, "flash-sd": IMAGES, "specflash": IMAGES, "msd": IMAGES, "sd-mllm-qualcomm": IMAGES,
    "spec-llava": IMAGES, "hyper-bagel": IMAGES, "holitom": IMAGES,
    "sjd": OF_IMAGES, "mc-sjd": OF_IMAGES, "dida": OF_IMAGES, "emu3.5-dida": OF_IMAGES, "nar": OF_IMAGES,
}  # fmt: skip


def unknown(kind: str, name: str) -> Refused:
    """The refusal of a name that a kind has not."""
    return Refused(f"there is no {registry.KINDS[kind].noun} {name!r}: {_answer(kind, name)}")


def answers(name: str) -> bool:
    """Whether a paper or another project has this name."""
    return plain(name) in _papers()


def plain(name: str) -> str:
    """A name as it is compared: small letters and digits alone."""
    small = name.removeprefix("lossy/").lower().replace("++", "pp")
    return "".join(sign for sign in small if sign.isalnum())


def _answer(kind: str, name: str) -> str:
    bare, found = name.removeprefix("lossy/"), plain(name)
    if bare in _names(f"{kind}.lossy"):
        return f"it is lossy: choose it with {_chosen(f'{kind}.lossy', bare)}"
    if homes := [home for home in registry.KINDS if home != kind and bare in _names(home)]:
        return f"it is {', or '.join(_home(kind, home, bare) for home in homes)}"
    own = {plain(one): one for one in _offered(kind)}
    if found in own:
        return f"did you mean {own[found]!r}?"
    if found in _papers():
        return _paper(kind, found)
    if kind == "drafters" and "/" in name:
        return f"give a draft model as draft='draft-model:model={name}', a trained head as draft='eagle3:model={name}'"
    return f"{_nearest(kind, found, own)} (`truedraft methods` lists all)"


def _nearest(kind: str, found: str, own: Mapping[str, str]) -> str:
    """The nearest names: of this kind, or else of another or of a paper. own: those of this kind by `plain`."""
    if near := difflib.get_close_matches(found, own, MOST, NEAR):
        return f"did you mean {' or '.join(repr(own[one]) for one in near)}?"
    others = {plain(one): (home, one) for home in registry.KINDS if home != kind for one in _names(home)}
    for one in difflib.get_close_matches(found, [*others, *_papers()], 1, SURE):
        if one not in others:
            return f"if you mean {one!r}, {_paper(kind, one)}"
        return f"did you mean {others[one][1]!r}, {_home(kind, *others[one])}?"
    return "no method or paper has a name like it"


def _names(kind: str) -> Iterable[str]:
    if kind not in registry.KINDS:
        return ()
    return *registry.names(kind), *registry.presets(kind)


def _offered(kind: str) -> Iterable[str]:
    """The names that an argument for this kind takes."""
    more = (*_names("views"), registry.AUTO, registry.NONE) if kind == "drafters" else ()
    return *_names(kind), *more


def _home(kind: str, home: str, name: str) -> str:
    """What a name of another kind is, and how it is chosen."""
    there = registry.KINDS[home]
    noun = f"{'an' if there.noun[0] in 'aeiou' else 'a'} {there.noun}"
    if there.models == registry.KINDS[kind].models:
        return f"{noun}, chosen with {_chosen(home, name)}"
    return f"{noun if there.models in noun else f'{noun} of {there.models}'}, given to them as {_chosen(home, name)}"


def _chosen(kind: str, name: str) -> str:
    about = registry.KINDS[kind]
    found = f"{about.argument}='{about.spelling.replace('NAME', name)}'"
    return f"{found} to draft, or view='lossy/{name}' to generate so" if kind == "views" else found


def _paper(kind: str, found: str) -> str:
    """What there is for a paper, or another project, of this name by `plain`."""
    home, name, answer = _papers()[found]
    if answer:
        return answer
    if home == kind or registry.KINDS[home].models == registry.KINDS[kind].models:
        return f"here it is {_chosen(home, name)}"
    return f"here it is {name!r}, {_home(kind, home, name)}"


@cache
def _papers() -> dict[str, tuple[str, str, str]]:
    """Names of papers and projects by `plain` -> the kind and the name of the method that covers it, and the answer; it
    is empty where that is the method itself, and where no method covers it the others are."""
    found = {plain(paper): ("", "", answer) for paper, answer in ELSEWHERE.items()}
    for paper, nearest in UNCOVERED.items():
        found[plain(paper)] = "", "", f"the paper of that name is not here{f'; {nearest}' if nearest else ''}"
    for kind in registry.KINDS:
        for name, papers in registry.also(kind).items():
            found |= {plain(paper): (kind, name, answer) for paper, answer in papers.items()}
    return found
