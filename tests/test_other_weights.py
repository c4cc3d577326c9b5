"""What was trained for a model drafts for it after a fine-tune too: sizes and tokens are checked, the report says that
the weights are others, and the text is that of `model.generate`. Weights that are no finite numbers are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import truedraft
from models import ragged, sibling, tiny
from test_seq2seq import sources
from test_seq2seq import tiny as encoder_decoder
from truedraft import Refused, registry
from truedraft.canvas.policies.lossy._filter import Filter
from truedraft.cli import main
from truedraft.cli._models import load
from truedraft.cli._options import CANVASES
from truedraft.drafters._learned import WEIGHTS
from truedraft.runtime.identity import identity_of
from vocabularies import spelling, tokenized

LEARNT = {name: registry.method("drafters", name) for name in registry.names("drafters")}
LEARNT |= {"deja-vu": registry.method("views", "deja-vu")}
BOUND = [name for name, method in LEARNT.items() if method.learner is not None and "training" in method.card.needs]
LAYERS = 3


def model_of(name: str) -> PreTrainedModel:
    return encoder_decoder("bart") if name == "gad" else tiny("llama", torch.float32, layers=LAYERS)


def inputs_of(name: str, model: PreTrainedModel) -> dict[str, Any]:
    return dict(sources()) if name == "gad" else dict(ragged(model, 2))


def learner_of(name: str, model: PreTrainedModel) -> Any:
    learner = LEARNT[name].learner(**({"model": sibling(model)} if name == "specdec-pp" else {}))
    learner.tokenizer = spelling(model.config.get_text_config(decoder=True).vocab_size)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        learner.begin(model)
    return learner


def drafter_of(name: str, folder: Path, small: PreTrainedModel) -> Any:
    """By the folder of a checkpoint, as `--draft NAME:FOLDER` has it."""
    if name == "specdec-pp":
        return registry.load("drafters", name, head=str(folder), model=small)
    return registry.load("drafters", f"{name}:{folder}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function from a method to the folder of an untrained checkpoint for its model, and that model."""
    made: dict[str, Path] = {}

    def folder(name: str) -> tuple[Path, PreTrainedModel]:
        model = model_of(name)
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            learner_of(name, model).save(made[name], model)
        return made[name], model

    yield folder


@pytest.mark.parametrize("name", BOUND)
def test_a_fine_tuned_model_is_drafted_for_and_the_report_says_so(saved: Any, name: str) -> None:
    folder, model = saved(name)
    for target in (model, sibling(model, 0.01)):
        fast = tokenized(target, draft=drafter_of(name, folder, sibling(model)), control="fixed")
        inputs = inputs_of(name, model)
        given = {"max_new_tokens": 9, "do_sample": False}
        assert torch.equal(fast.generate(**inputs, **given), target.generate(**inputs, **given, num_beams=1))
        notes = [note for note in fast.report().notes if "for other weights" in note]
        assert len(notes) == (target is not model), notes
        assert all(identity_of(model).fingerprint in note and "fewer of its drafts" in note for note in notes)
        again = learner_of(name, target)
        assert bool(again.restore(folder, target)) == (target is not model)


@pytest.mark.parametrize("name", [name for name in BOUND if name != "gad"])
def test_a_model_of_other_sizes_or_tokens_is_refused(saved: Any, name: str) -> None:
    folder, model = saved(name)
    sizes = {**model.config.to_dict(), "hidden_size": 48, "head_dim": 12}
    others = {
        "vocabulary": tiny("llama", torch.float32, layers=LAYERS, vocabulary=53),
        "layers": tiny("llama", torch.float32, layers=LAYERS + 1),
        "hidden size": LlamaForCausalLM(LlamaConfig(**sizes)).eval(),
    }
    if name == "specdec-pp":
        del others["vocabulary"]  # that of the draft model is refused before
    for other in others.values():
        with pytest.raises(Refused, match=r"was trained for another model .*hidden size 32 and 3 layers; this is"):
            tokenized(other, draft=drafter_of(name, folder, sibling(model)))
    if name != "deja-vu":  # predicts no tokens
        with pytest.raises(Refused, match="was trained for a model with other tokens"):
            other = sibling(model)
            truedraft.accelerate(other, spelling(61, turn=3), draft=drafter_of(name, folder, other))


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(saved: Any, name: str, wrong: float, tmp_path: Path) -> None:
    _, model = saved(name)
    learner = learner_of(name, model)
    part, weight = next(iter(learner.module.named_parameters()))
    with torch.no_grad():
        weight.flatten()[-1] = wrong
    learner.save(tmp_path, model)
    with pytest.raises(Refused, match=rf"(NaN|infinity) in 1 of .* numbers of {part}: it is damaged"):
        tokenized(model, draft=drafter_of(name, tmp_path, sibling(model)))
    with pytest.raises(Refused, match=r"(NaN|infinity) in 1 of"):
        learner_of(name, model).restore(tmp_path, model)
    given = {"head": learner.module, "model": sibling(model)} if name == "specdec-pp" else {"model": learner.module}
    with pytest.raises(Refused, match=r"the given module has (NaN|infinity) in 1 of"):
        truedraft.accelerate(model, draft=registry.load("drafters", name, **given))


def test_draft_models_and_filters_with_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model, tokenizer = load("nano-draft")
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.lm_head.weight[7, 7] = float("nan")
    wrong.save_pretrained(tmp_path / "wrong")
    tokenizer.save_pretrained(tmp_path / "wrong")
    for name in ("draft-model", "opt-tree", "ouroboros", "cs-drafting"):
        with pytest.raises(Refused, match=r"the draft model: '.*wrong' has NaN in 1 of"):
            truedraft.accelerate(model, tokenizer, draft=f"{name}:model={tmp_path / 'wrong'}")
    made = Filter(8)
    with torch.no_grad():
        next(made.parameters()).flatten()[0] = float("inf")
    made.save(tmp_path / "filter")
    with pytest.raises(Refused, match=r"lossy/learn2pd: '.*filter' has infinity in 1 of"):
        diffusion, words = load("nano-diffusion", runs=CANVASES)
        truedraft.accelerate(diffusion, words, rule=f"lossy/learn2pd:model={tmp_path / 'filter'}")


@pytest.mark.parametrize("name", BOUND)
def test_a_checkpoint_of_another_method_is_named_and_nothing_is_to_be_overwritten(saved: Any, name: str) -> None:
    folder, model = saved(name)
    written = LEARNT[name].learner.name
    for other in BOUND:
        if LEARNT[other].learner.name == written or (other == "gad") != (name == "gad"):
            continue
        with pytest.raises(Refused) as refused:
            tokenized(model, draft=drafter_of(other, folder, sibling(model)))
        message = str(refused.value)
        head = "head=" if written == "specdec-pp" else ""
        assert f"is a checkpoint of {written}, which reads it as draft='{written}:{head}{folder}'" in message
        assert "--out" not in message


def test_no_advice_names_a_folder_that_exists(tmp_path: Path) -> None:
    """Neither that of a model, nor one of the package."""
    model, tokenizer = load("nano-draft")
    model.save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    mine = [f"{name}:{tmp_path / 'mine'}" for name in ("gad", "eagle3", "medusa", "deja-vu", "hydra")]
    mine.append(f"specdec-pp:head={tmp_path / 'mine'}")
    for draft in (*mine, "eagle:nano-eagle3", "hydra:nano-medusa", "medusa:nano-eagle3"):
        with pytest.raises(Refused) as refused:
            truedraft.accelerate(model, tokenizer, draft=draft)
        message = str(refused.value)
        assert f"--out {tmp_path}" not in message and "--out nano" not in message and "assets" not in message, message
    assert sorted(path.name for path in (tmp_path / "mine").iterdir() if path.name == "notes.txt")


def test_a_view_that_was_calibrated_for_other_weights_drafts_and_says_so(tmp_path: Path) -> None:
    model = model_of("")
    tuned, other, inputs = sibling(model, 0.01), tiny("llama", torch.float32, layers=LAYERS + 1), ragged(model, 2)
    found = {"layers": "1", **identity_of(model).record()}
    (tmp_path / "found.json").write_text(json.dumps(found))
    for name in ("sleb", "draft-and-verify", "d3"):
        spec = f"{name}:file={tmp_path / 'found.json'}"
        for target in (model, tuned):
            for draft in (spec, f"{spec}+window-kv:recent=4", f"{spec}<suffix"):
                fast = tokenized(target, draft=draft, control="fixed")
                text = fast.generate(**inputs, max_new_tokens=9, do_sample=False)
                assert torch.equal(text, target.generate(**inputs, max_new_tokens=9, do_sample=False))
                notes = [note for note in fast.report().notes if "for other weights" in note]
                assert len(notes) == (target is tuned) and all(f"{name} was calibrated" in note for note in notes)
            if name != "d3":
                fast = tokenized(target, draft=None, view=f"lossy/{spec}")
                fast.generate(**inputs, max_new_tokens=3, do_sample=False)
                notes = [note for note in fast.report().notes if "for other weights" in note]
                assert len(notes) == (target is tuned) and all("worse approximation" in note for note in notes)
        with pytest.raises(Refused, match=r"was calibrated for another model .*and 3 layers; this is .*4 layers"):
            tokenized(other, draft=spec)


def test_the_command_goes_on_from_a_head_after_a_fine_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load("nano-draft")
    tuned = sibling(model, 0.001)
    tuned.save_pretrained(tmp_path / "tuned")
    tokenizer.save_pretrained(tmp_path / "tuned")
    (tmp_path / "lines.txt").write_text("once upon a time there was a dog\nthe cat sat on a mat\n" * 6)
    given = ["--data", str(tmp_path / "lines.txt"), "--max-new-tokens", "8", "--minutes", "0.01", "--every", "0.01"]
    training = ["train", "medusa:heads=2", *given]
    assert main([*training, "--target", "nano-draft", "--out", str(tmp_path / "run")]) == 0
    kept = (tmp_path / "run" / WEIGHTS).read_bytes()
    other = ["--target", str(tmp_path / "tuned")]
    assert main([*training, *other, "--out", str(tmp_path / "run"), "--resume"]) == 2
    assert (
        "--resume: medusa: " in (told := capsys.readouterr().err) and "for other weights" in told and "--from" in told
    )
    assert main([*training, *other, "--from", str(tmp_path / "run"), "--out", str(tmp_path / "next")]) == 0
    assert "for other weights" in "".join(capsys.readouterr())
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == kept
    capsys.readouterr()
    run = ["generate", str(tmp_path / "tuned"), "once upon", "--max-new-tokens", "6", "--json"]
    notes = {}
    for folder in ("run", "next"):
        assert main([*run, "--draft", f"medusa:{tmp_path / folder}"]) == 0
        notes[folder] = "for other weights" in capsys.readouterr().out
    assert notes == {"run": True, "next": False}


def test_an_embedded_head_drafts_for_a_fine_tune_of_its_model() -> None:
    model, tokenizer = load("nano")
    tuned = sibling(model, 0.001)
    fast = truedraft.accelerate(tuned, tokenizer, draft="eagle3:nano-eagle3", control="fixed")
    ids = tokenizer("once upon a time", return_tensors="pt").input_ids
    expected = tuned.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=12, do_sample=False), expected)
    assert any("for other weights" in note for note in fast.report().notes)
    assert fast.report().mean_acceptance_length > 1.5
