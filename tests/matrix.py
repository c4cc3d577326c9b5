"""Every method with every feature: the cells of `docs/matrix.md`, each found by running it.

A drafter's cell is exact where text and random stream are those of `model.generate`, greedy and sampled. A rule's cell
is exact likewise where the rule guarantees tokens. Where it guarantees the law, the text must be possible under it, end
where plain decoding would end it, and return the scores of the model (the law itself: test_law.py, test_rules.py and
`truedraft audit --laws`). An unsupported feature is refused with a sentence, which is then the cell.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import truedraft
from models import V, ragged
from nets import PROCESSORS, SEED, drafter, eos_inside, made, model_for, text_net, two_in_three
from truedraft import registry
from vocabularies import tokenized

EXACT, LAW = "exact", "law"
LETTERS = [*string.ascii_letters, *string.digits][:V]
_tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
_tokenizer.decoder = decoders.Fuse()
SPELT = PreTrainedTokenizerFast(tokenizer_object=_tokenizer, pad_token=LETTERS[0])
SAMPLED = {"do_sample": True, "top_k": 0}


class RecordingStreamer(BaseStreamer):
    """Records the tokens streamed, without the prompt."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.steps.append(value.flatten().tolist())

    def end(self) -> None:
        """Nothing to flush."""


def _inside(model: PreTrainedModel, rule: dict[str, Any]) -> int:
    """A token in the middle of the text."""
    return eos_inside(model, ragged(model, 3), **rule)


# feature -> settings of generate, from those of the way of choosing tokens, and the model
SETTINGS: dict[str, Callable[[dict[str, Any], PreTrainedModel], dict[str, Any]]] = {
    "one row": lambda way, model: {"rows": 1},
    "ragged batch": lambda way, model: {"rows": 4},
    "temperature, top-k, top-p, min-p": lambda way, model: {
        "temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "do_sample": True,
    },
    "repetition penalty": lambda way, model: {"repetition_penalty": 1.4},
    "no repeated n-grams": lambda way, model: {"no_repeat_ngram_size": 3},
    "banned words": lambda way, model: {"bad_words_ids": [[7], [8, 9]]},
    "fewest new tokens": lambda way, model: {
        "min_new_tokens": 20, "eos_token_id": _inside(model, way), "pad_token_id": 0,
    },
    "constrained decoding": lambda way, model: {"prefix_allowed_tokens_fn": two_in_three},
    "a processor of one's own": lambda way, model: {"logits_processor": PROCESSORS["stranger"]["logits_processor"]},
    "a stopping criterion of one's own": lambda way, model: {
        "stopping_criteria": PROCESSORS["stranger"]["stopping_criteria"],
    },
    "stop strings": lambda way, model: {
        "stop_strings": [LETTERS[_inside(model, way)]], "eos_token_id": 1, "pad_token_id": 0, "tokenizer": SPELT,
    },
    "end of text inside a run": lambda way, model: {"eos_token_id": [_inside(model, way), 1], "pad_token_id": 0},
    "longest length inside a run": lambda way, model: {"max_new_tokens": 3},
    "n texts of a prompt": lambda way, model: {"rows": 1, "num_return_sequences": 3, "do_sample": True},
}  # fmt: skip


def _scores(check: Check) -> str:
    """Scores and logits as `model.generate` returns them, on the generated text."""
    inputs = ragged(check.model, 3)
    out = check.run(inputs, max_new_tokens=20, output_scores=True, output_logits=True, return_dict_in_generate=True)
    start = inputs["input_ids"].shape[1]
    for row, mask in enumerate(inputs["attention_mask"]):
        ids = out.sequences[row][mask.sum().sub(start).abs() :]
        with torch.no_grad():
            plain = check.model(ids[None], use_cache=False).logits[0, -len(out.logits) - 1 : -1].float()
        mine = torch.stack([step[row] for step in out.logits])
        assert torch.allclose(mine, plain, atol=1e-4)
    return check.kind


def _streamed(check: Check) -> str:
    streamer, inputs = RecordingStreamer(), ragged(check.model, 1)
    out = check.run(inputs, max_new_tokens=20, streamer=streamer)
    assert [t for step in streamer.steps for t in step] == out[0].tolist()
    return check.kind


def _own_seed(check: Check) -> str:
    """A row's text does not depend on its neighbours where rows are seeded by position."""
    inputs = ragged(check.model, 3)
    together = check.run(inputs, max_new_tokens=15, seed=[5, 6, 7], sample=True)
    start = inputs["input_ids"].shape[1]
    for row, seed in enumerate((5, 6, 7)):
        pad = int((inputs["attention_mask"][row] == 0).sum())
        alone = check.run(
            {"input_ids": inputs["input_ids"][row : row + 1, pad:]}, max_new_tokens=15, seed=[seed], sample=True
        )
        assert torch.equal(alone[0, start - pad :], together[row, start:])
    return check.kind


def _embedded(check: Check) -> str:
    """A prompt of embeddings."""
    embeds = check.model.get_input_embeddings()(ragged(check.model, 1)["input_ids"])
    assert check.run({"inputs_embeds": embeds}, max_new_tokens=12).shape == (1, 12)
    return check.kind


def _refused_prefix(check: Check) -> str:
    check.run(ragged(check.model, 1), max_new_tokens=5, past_key_values=object())
    return check.kind


def _refused_beams(check: Check) -> str:
    check.run(ragged(check.model, 1), max_new_tokens=5, num_beams=2)
    return check.kind


CHECKS: dict[str, Callable[[Check], str]] = {
    "seeds by position": _own_seed,
    "scores and logits returned": _scores,
    "streaming": _streamed,
    "a prompt of embeddings": _embedded,
    "prefix reuse": _refused_prefix,
    "beams": _refused_beams,
}
FEATURES = [*SETTINGS, *CHECKS]
PARTNERS = {"k-seq": "spectr", "greedy-multi-draft": "greedy-multi-draft", "multi-round": "gumbel-top-k"}


class Check:
    """One method: a drafter under the rules with guarantee `tokens`, or a rule with drafts that suit it.

    in_turn: alternate features between greedy and sampled, instead of trying both, where a method supports both.
    """

    def __init__(self, kind: str, name: str, in_turn: bool = False):
        self.turn = registry.names(kind).index(name) if in_turn else None
        self.drafts = kind == "drafters"
        self.name = name if self.drafts else PARTNERS.get(name, "draft-model")
        self.rule = None if self.drafts else registry.load("accept", name)
        guarantee = "tokens" if self.rule is None else self.rule.guarantee
        self.kind = EXACT if guarantee == "tokens" else LAW
        self.model = model_for(self.name, torch.float32)  # passes by compiled code, as users have them
        draft = drafter(self.name, self.model)
        self.fast = tokenized(self.model, draft=draft, rule=self.rule, control="fixed")
        self.ways = [{"do_sample": False}, SAMPLED]
        if self.rule is not None:
            self.ways = [SAMPLED if self.rule.samples else {"do_sample": False}]

    def run(self, inputs: dict[str, Any], sample: bool = False, **kwargs: Any) -> Any:
        """One call, greedy or sampled as the rule requires."""
        way = self.ways[-1] if sample else self.ways[0]
        torch.manual_seed(SEED)
        return self.fast.generate(**inputs, **{**way, **kwargs})

    def cell(self, feature: str) -> str:
        """The cell of the matrix; raises AssertionError where the method is neither exact nor refused."""
        try:
            if feature in CHECKS:
                return CHECKS[feature](self)
            if not (cases := self._cases(feature)):
                return "not for greedy decoding"
            for settings in cases:
                rows = settings.pop("rows", 3)
                if self.kind == EXACT:
                    text_net(self.model, self.name, ragged(self.model, rows), **settings)
                else:
                    self._allowed(rows, settings)
            return self.kind
        except truedraft.Refused as why:
            return f"refused: {why}"

    def _cases(self, feature: str) -> list[dict[str, Any]]:
        """Settings to try a feature with, greedy and sampled where it supports both, or one of them in turn."""
        found = [(way, {"max_new_tokens": 30, **way, **SETTINGS[feature](way, self.model)}) for way in self.ways]
        cases = [settings for way, settings in found if settings["do_sample"] == way["do_sample"]]
        if self.turn is not None and cases:
            cases = [cases[(self.turn + FEATURES.index(feature)) % len(cases)]]
        return cases

    def _allowed(self, rows: int, settings: dict[str, Any]) -> None:
        """The text is one that plain decoding could have generated with the same settings, with the same end.

        Plain `model.generate` is forced to emit it, which fails where a token is impossible or the text would have
        ended elsewhere.
        """
        inputs = ragged(self.model, rows)
        torch.manual_seed(SEED)
        text = self.fast.generate(**inputs, **made(settings))
        given, force = made(settings), Forced(text, inputs["input_ids"].shape[1])
        given["logits_processor"] = LogitsProcessorList([*given.get("logits_processor", []), force])
        assert torch.equal(self.model.generate(**inputs, **given), text) and not force.impossible


class Forced:
    """A processor, after all others, that allows only the token of a given text; counts the impossible ones."""

    def __init__(self, text: torch.Tensor, start: int):
        self.text, self.start, self.impossible = text, start, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = input_ids.shape[1]
        if at >= self.text.shape[1]:
            return scores
        token = self.text[:, at : at + 1]
        ended = (self.text[:, self.start : at] != input_ids[:, self.start :]).any(-1)
        self.impossible += int((scores.gather(1, token)[:, 0].isinf() & (token[:, 0] != 0) & ~ended).sum())
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


def methods() -> list[tuple[str, str]]:
    """(kind, name) of the matrix's rows."""
    return [
        ("drafters", name)
        for name in registry.names("drafters")
        if "decoder" not in registry.method("drafters", name).card.cannot
    ] + [("accept", name) for name in registry.names("accept")]


def cells(kind: str, name: str, features: Sequence[str] = FEATURES, in_turn: bool = False) -> dict[str, str]:
    check = Check(kind, name, in_turn)
    return {feature: check.cell(feature) for feature in features}


def page(found: dict[tuple[str, str], dict[str, str]]) -> str:
    """docs/matrix.md: a line for each method, with the features in which it is not what its line says."""
    refused = {
        f: cells[f] for cells in found.values() for f in FEATURES if all(c[f] == cells[f] for c in found.values())
    }
    refused = {feature: cell for feature, cell in refused.items() if cell.startswith("refused")}
    lines = [
        "# Every method with every feature", "",
        "Written by `python tools/matrix.py` from a run of `tests/matrix.py`; `make test` repeats the exceptions and a",
        "third of the other cells, those of drafters alternately greedy and sampled, and `make real` all of them.", "",
        f"- `{EXACT}`: the text of `model.generate`, token for token, and the random stream too.",
        f"- `{LAW}`: text of the model's distribution, cut where plain decoding would cut it.",
        "- Anything else is an exception, listed in the method's line; a refusal with its sentence.", "",
        "The features:", "",
        *(f"- {feature}" for feature in FEATURES if feature not in refused), "",
        "Refused with every method:", "",
        *(f"- {feature}: {_sentence(cell)}" for feature, cell in refused.items()), "",
    ]  # fmt: skip
    for kind, title in (("drafters", "Drafters, under greedy and seeded"), ("accept", "Acceptance rules")):
        lines += [f"## {title}", "", "| method | every feature is | except |", "|---|---|---|"]
        for name in (name for k, name in found if k == kind):
            cells = {feature: cell for feature, cell in found[kind, name].items() if feature not in refused}
            usual = EXACT if list(cells.values()).count(EXACT) * 2 > len(cells) else LAW
            others = [f"{feature}: {_sentence(cell)}" for feature, cell in cells.items() if cell != usual]
            lines.append(f"| `{name}` | {usual} | {'<br>'.join(others)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _sentence(cell: str) -> str:
    """A cell as the page shows it: a refusal with its sentence in code."""
    why = cell.removeprefix("refused: ")
    return cell if why == cell else f"refused: `{why}`"
