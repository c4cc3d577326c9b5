"""Names that a kind of methods does not have are answered: with where they belong, what there is for the paper of that
name, or the nearest; and methods that hold a part of their paper say so."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from models import ragged
from nets import SUITED, drafter, model_for
from truedraft import Refused, answers, registry
from truedraft.cli import main
from vocabularies import tokenized

METHODS = [(kind, name) for kind in registry.KINDS for name in (*registry.names(kind), *registry.presets(kind))]
OTHERS = ("drafters", "accept", "accept.lossy", "control", "canvas.policies", "canvas.speculators", "canvas.views")
CHOICE = re.compile(r"(draft|rule|control|view)='([^']+)'")
TRAINING = re.compile(r"`truedraft train ([a-z][\w-]*)(?::([^` ]*))?[` ]")
ASKED = {  # what a caller may have meant -> the kinds that the argument may name, by the model
    "draft": ("drafters", "canvas.speculators", "canvas.subsets"),
    "rule": ("accept", "canvas.policies"),
    "control": ("control",),
    "view": ("views", "canvas.views"),
}


def checked(argument: str, spec: str) -> bool:
    """Whether an argument takes a spec for some kind of models."""

    def taken(kind: str) -> bool:
        try:
            if kind == "views":
                registry.check_lossy_view(spec)
            else:
                registry.check(kind, registry.canvas_view(spec) if kind == "canvas.views" else spec)
        except Refused:
            return False
        return True

    return any(taken(kind) for kind in ASKED[argument])


def answer(kind: str, name: str) -> str:
    with pytest.raises(Refused) as refused:
        registry.check(kind, name)
    message = str(refused.value)
    assert message.startswith("there is no ") and len(message) < 480 and "\n" not in message
    assert message.count("' or '") < 3, "more than three names"
    return message


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_a_name_given_as_another_kind_is_answered_with_the_argument_that_takes_it(kind: str, name: str) -> None:
    for other in OTHERS:
        offered = {*registry.names(other), *registry.presets(other)}
        lossy = f"{other}.lossy"
        if lossy != kind and lossy in registry.KINDS and name in registry.names(lossy):
            continue  # a drafter and a lossy rule: for the argument of rules it is the latter
        if other == kind or name in offered or (other == "drafters" and kind == "views"):
            continue
        choices = CHOICE.findall(answer(other, name))
        mine = registry.KINDS[kind].spelling.replace("NAME", name)
        assert (registry.KINDS[kind].argument, mine) in choices
        assert all(checked(*choice) for choice in choices)


PAPERS = {  # a name, and what its answer has to have
    "triforce": "retrieval-kv:depth=6,nodes=6<draft-model", "specinfer": "multi-round", "hass": "eagle2",
    "Griffin": "not here", "vocabtrim": "vocabulary=", "FR-Spec": "vocabulary=", "rsd": "gumbel-top-k",
    "jacobi": "lookahead", "LADE": "lookahead", "lookahead decoding": "lookahead", "MagicDec": "window-kv",
    "kangaroo": "eesd", "layerskip": "early-exit", "medusa-2": "medusa:FOLDER", "eagle-1": "eagle", "EAGLE-3": "eagle3",
    "specdec++": "specdec-pp", "hydra++": "hydra", "pld": "prompt-lookup", "slem": "string-level-exact",
    "sam-decoding": "sam", "ssd-dllm": "ssd", "flashdlm": "guided", "rapid": "not here", "longspec": "glide",
    "redrafter": "not read", "taps": "confidence-routing", "tvd++": "loss_name", "speculative-sampling": "rejection",
    "block verification": "block", "specmemo": "truedraft plan",
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_the_name_of_a_paper_is_answered_with_what_there_is(name: str) -> None:
    for kind in ("drafters", "accept", "canvas.speculators"):
        message = answer(kind, name)
        assert PAPERS[name] in message and ("eagle" not in PAPERS[name] or "eagle" in message)
    assert PAPERS[name] in answer("drafters", f"{name}:FOLDER"), "the model behind a name hides it"
    if "+" not in name:
        assert PAPERS[name] in answer("drafters", f"suffix+{name}")


def test_what_answers_name_exists() -> None:
    """Every choice and every training in an answer is one that its argument takes."""
    for name, (_, _, text) in answers._papers().items():
        for argument, spec in CHOICE.findall(text):
            assert checked(argument, spec), (name, spec)
        for method, knobs in TRAINING.findall(text):
            known = registry.method("drafters", method).learner.__dataclass_fields__
            assert all(knob.partition("=")[0] in known for knob in knobs.split(",") if knob), (name, knobs)


def test_names_of_papers_are_declared_once_and_are_no_methods() -> None:
    declared_names = [
        answers.plain(paper)
        for kind in registry.KINDS for papers in registry.also(kind).values() for paper in papers
    ] + [*map(answers.plain, (*answers.UNCOVERED, *answers.ELSEWHERE))]  # fmt: skip
    assert len(declared_names) == len(set(declared_names))
    assert not {name for _, name in METHODS} & {*answers.UNCOVERED, *answers.ELSEWHERE}
    papers = {paper for kind in registry.KINDS for found in registry.also(kind).values() for paper in found}
    assert not {name for _, name in METHODS} & papers


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, name in METHODS if len(name) > 5])
def test_a_misspelling_is_answered_with_the_name(kind: str, name: str) -> None:
    middle = len(name) // 2
    for wrong in (name[:middle] + name[middle + 1 :], name[:-1] + name[-1] * 2, name[0] + name[2] + name[1] + name[3:]):
        if wrong != name and answers.plain(wrong) not in {answers.plain(one) for _, one in METHODS}:
            assert repr(name) in answer("drafters" if kind == "views" else kind, wrong)


def test_a_word_like_no_name_lists_none() -> None:
    for word in ("xyzzy", "", "q", "the quick brown fox", "0", "draft"):
        for kind in registry.KINDS:
            assert len(answer(kind, word)) < 320


def test_commands_answer_for_the_kind_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    for line, expected in (
        ("generate nano x --draft freedave", "it is a speculator of diffusion models"),
        ("generate nano x --rule lossy/fast-dllm", "it is a lossy policy of diffusion models"),
        ("generate nano x --view lossy/dual-cache", "it is a view of diffusion models"),
        ("generate nano x --draft lossy/fast-dllm", "it is a lossy policy of diffusion models"),
        ("generate nano x --draft greedy", "chosen with --rule greedy"),
        ("generate nano x --rule eagle3", "chosen with --draft eagle3"),
        ("generate nano x --control suffix", "chosen with --draft suffix"),
        ("generate nano-diffusion x --draft eagle3", "a drafter of models that write one token after another"),
        ("generate nano-diffusion x --rule lossy/typical", "a lossy rule of models that write one token after another"),
        ("generate nano-diffusion x --view lossy/int4-self", "a view of models that write one token after another"),
        ("bench nano --draft triforce", "retrieval-kv:depth=6,nodes=6<draft-model"),
        ("train vocabtrim --target nano --data x --out y", "eagle3:vocabulary=N"),
    ):  # fmt: skip
        assert main(line.split()) == 2
        assert expected in capsys.readouterr().err


def card(kind: str, name: str) -> Any:
    return registry.method(kind, name).card


LACKING = [
    (kind, name, one) for kind, name in METHODS if name in registry.names(kind) for one in card(kind, name).lacks
]
PARTS = [one for kind, _, one in LACKING if kind in ("drafters", "views")]


def test_what_is_lacking_is_said_of_a_method_or_of_a_preset_of_it() -> None:
    assert {"tokenswift", "sparse-to-dense", "blockffn", "unified-layer-skipping"} < {*PARTS}
    for kind, name, one in LACKING:
        assert one == name or registry.presets(kind)[one][0] == name
        sentence = card(kind, name).lacks[one]
        assert sentence[0].islower() and sentence[-1] not in ".;" and len(sentence) > 40


def suited(name: str, one: str) -> Any:
    """A tiny model for a method or a preset of it."""
    return model_for(one if one in SUITED else name, torch.float32)


def reported(name: str, one: str = "", **settings: Any) -> list[str]:
    """The sentences of the report of a call."""
    model = suited(name, one)
    fast = tokenized(model, control="fixed", **settings)
    inputs = ragged(model, 1)
    text = fast.generate(**inputs, max_new_tokens=4, do_sample=False)
    if fast.report().guarantee == "tokens":
        assert torch.equal(text, model.generate(**inputs, max_new_tokens=4, do_sample=False))
    return [note for note in fast.report().notes if "holds a part of its paper" in note]


def said(kind: str, name: str, one: str) -> str:
    return f"{one} holds a part of its paper: {card(kind, name).lacks[one]}"


@pytest.mark.parametrize(("kind", "name", "one"), [some for some in LACKING if some[0] in ("drafters", "views")])
def test_the_report_of_a_draft_says_which_part_its_method_is(kind: str, name: str, one: str) -> None:
    model = suited(name, one)
    if kind == "views":
        knobs = {"entries": 4} if name == "top-kv" else {"layers": "1"} if name == "d3" else {}
        made = drafter(name, model) if name == "deja-vu" else registry.load("drafters", one, **knobs)
    else:
        made = drafter(one, model)
    assert reported(name, one, draft=made) == [said(kind, name, one)]


def test_presets_say_it_under_other_knobs_too_and_their_methods_do_not() -> None:
    small = "entries=4,recent=2"
    assert reported("top-kv", draft=f"tokenswift:{small}") == [said("views", "top-kv", "tokenswift")]
    assert reported("top-kv", draft=f"sparse-to-dense:{small}<suffix") == [said("views", "top-kv", "sparse-to-dense")]
    assert reported("top-kv", draft=f"tokenswift:{small}+suffix") == [said("views", "top-kv", "tokenswift")]
    assert reported("top-kv", draft=f"unified-layer-skipping+tokenswift:{small}") == [
        said("views", "skip-layers", "unified-layer-skipping"), said("views", "top-kv", "tokenswift"),
    ]  # fmt: skip
    assert reported("top-kv", draft=f"top-kv:{small}") == reported("skip-layers", draft="skip-layers") == []


def test_lossy_views_and_rules_say_it_too() -> None:
    found = reported("skip-layers", draft=None, view="lossy/unified-layer-skipping")
    assert found == [said("views", "skip-layers", "unified-layer-skipping")]
    assert reported("greedy", rule="lossy/reflective") == [said("accept.lossy", "reflective", "reflective")]


def test_the_list_of_methods_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for kind, name, one in LACKING:
        assert said(kind, name, one) in text
    assert "triforce" in text
