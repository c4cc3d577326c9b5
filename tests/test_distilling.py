"""Training of draft models: against plain forwards, the engine's passes, and folders as `transformers` reads them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import models
import seq2seq_models
import truedraft
from test_train import plan, target, texts, tokenizer
from truedraft import Refused, registry
from truedraft.cli import main
from truedraft.drafters._learned import Batch
from truedraft.train import drafter
from truedraft.train.batches import Feed, Line, Reader
from truedraft.train.checkpoints import STATE, read_state
from truedraft.train.drafter import CURVES, LOG, train_drafter
from truedraft.train.responses import Responding

WEIGHTS = "model.safetensors"
SMALL: dict[str, Any] = dict(layers=1, width=16)


@pytest.fixture(autouse=True)
def _many_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "HELD_OUT", 5)


def sharp() -> PreTrainedModel:
    """A tiny target whose distributions are not flat."""
    model = target()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6)
    return model


def learner(of: PreTrainedModel | None = None, **knobs: Any) -> Any:
    target()  # the first one draws random numbers
    torch.manual_seed(3)
    made = registry.method("drafters", "draft-model").learner(**{**({} if "model" in knobs else SMALL), **knobs})
    if of is not None:
        made.tokenizer = tokenizer()
        made.begin(of)
        made.prepare(torch.ones(models.V))
    return made


def responded(model: PreTrainedModel, count: int = 12, new: int = 24) -> list[Line]:
    """Prompts with the model's greedy responses, by its own `generate`."""
    found = []
    for text in texts(count):
        ids = tokenizer()(text).input_ids
        found.append((ids, model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, len(ids) :]))
    return [(ids, response.tolist()) for ids, response in found]


def batch_of(model: PreTrainedModel, lines: list[Line]) -> Batch:
    return Reader(model, (-1,))(lines)


def trained(out: Path, **knobs: Any) -> tuple[Any, dict[str, float]]:
    given = {name: knobs.pop(name) for name in ("loss_name", "model", "heads") if name in knobs}
    made = learner(**given)
    defaults: dict[str, Any] = dict(plan=plan(), batch=160, how=Responding(9), report=lambda text: None)
    return made, train_drafter(made, target(), tokenizer(), texts(30), out, **{**defaults, **knobs})


@pytest.mark.parametrize("length", [1, 4])
def test_tokens_per_pass_are_those_of_the_engine(length: int) -> None:
    """Of greedy chains: passes after that of the prompt, and acceptance by position, over rows of different lengths."""
    model = target()
    student = models.sibling(model).float()
    made = learner(model, model=student, drafted=length)
    lines = responded(model)
    found = made.evaluate([batch_of(model, lines[:7]), batch_of(model, lines[7:])])
    draft = registry.load("drafters", "draft-model", model=student, length=length)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    tokens = passes = 0
    for ids, response in lines:
        out = fast.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        assert out[0, len(ids) :].tolist() == response
        tokens, passes = tokens + len(response) - 1, passes + len(fast.report().passes) - 1
    assert found["tokens_per_pass"] == round(tokens / passes, 3)
    assert 1.05 < found["tokens_per_pass"] < length + 0.95, "some drafts are right, and some are not"
    assert len(found["acceptance"]) == length


def test_loss_and_overlap_are_those_of_plain_forwards() -> None:
    model = sharp()
    made, lines = learner(model, loss_name="tvd"), responded(model, 5)
    batch = batch_of(model, lines)
    shared = []
    with torch.no_grad():
        for prompt, response in lines:
            ids = torch.tensor([prompt + response])
            p, q = (m(ids).logits[0, len(prompt) - 1 : -1].double().softmax(-1) for m in (model, made.module))
            shared.append(torch.minimum(p, q).sum(-1))
    expected = torch.cat(shared).mean()
    assert 0.05 < expected < 0.95
    assert made.loss(batch).item() == pytest.approx(1 - float(expected), abs=1e-5)
    assert made.evaluate([batch])["overlap"] == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("name", ["ce", "kl", "tvd", "tvd++"])
def test_training_brings_the_draft_nearer(name: str, tmp_path: Path) -> None:
    """By the rate of rejection on lines that are not trained on; the target is as it was."""
    model = sharp()
    before, lines = copy.deepcopy(model.state_dict()), responded(model, 8)
    batch = batch_of(model, lines)
    judge = learner(model, loss_name="tvd")
    made = learner(loss_name=name)
    fresh = judge.loss(batch).item()
    figures = train_drafter(
        made, model, tokenizer(), texts(150, 9), tmp_path, plan(steps=60), batch=300, how=Responding(9),
        report=lambda text: None,
    )  # fmt: skip
    judge.module.load_state_dict(made.module.state_dict())
    assert judge.loss(batch).item() < fresh - 0.05 and figures["tokens_per_pass"] > 1
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert made.needs.hidden == (() if name == "ce" else (-1,)), "tokens alone need no pass of the target"
    (row,) = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert {"loss", "tokens_per_pass", "acceptance"} < row.keys() and ("overlap" in row) == (name != "ce")


def test_folder_is_a_model_of_transformers_that_drafts(tmp_path: Path) -> None:
    made, _ = trained(tmp_path, loss_name="tvd++")
    assert {path.name for path in tmp_path.iterdir()} >= {WEIGHTS, "config.json", STATE, LOG, CURVES, "tokenizer.json"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    plain, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.tensor([[5, 6, 7, 9]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, made.module(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer().get_vocab()
    assert plain.generation_config.eos_token_id == target().generation_config.eos_token_id
    assert plain.config.tie_word_embeddings and plain.config.hidden_size == 16
    model = target()
    fast = truedraft.accelerate(model, tokenizer(), draft=f"draft-model:{tmp_path}", control="fixed")
    assert fast.generate(ids, max_new_tokens=9).equal(model.generate(ids, max_new_tokens=9, do_sample=False))


@pytest.mark.parametrize("tied", [True, False])
def test_fresh_student_begins_with_the_directions_in_which_embeddings_differ_most(tied: bool) -> None:
    """Products of its embeddings are, up to one factor, the best approximation of the target's of that rank."""
    model = target()
    made = learner(model, tied=tied)
    sides = ("get_input_embeddings", "get_output_embeddings")
    for side in sides:
        theirs, own = (getattr(one, side)().weight.detach().double() for one in (model, made.module))
        theirs = model.get_input_embeddings().weight.detach().double() if tied else theirs
        u, s, v = torch.linalg.svd(theirs)
        best = (u[:, :16] * s[:16]) @ v[:16]
        products, expected = own @ own.T, best @ best.T
        torch.testing.assert_close(products / products.norm(), expected / expected.norm(), rtol=1e-3, atol=1e-5)
        assert float(own.square().mean().sqrt()) == pytest.approx(0.02, rel=1e-3)
    assert (made.module.lm_head.weight is made.module.model.embed_tokens.weight) == tied
    learnt = [parameter for group in made.parameter_groups() for parameter in group]
    assert {id(one) for one in learnt} == {id(one) for one in made.module.parameters()}
    assert not any(one.shape[0] == models.V for one in made.parameter_groups()[0]), "none of them by Muon"


def _interrupted(out: Path, steps: int) -> None:
    made, calls = learner(), 0
    loss = made.loss

    def cancelled(batch: Batch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > steps:
            raise KeyboardInterrupt
        return loss(batch)  # type: ignore[no-any-return]

    made.loss = cancelled
    with pytest.raises(KeyboardInterrupt):
        train_drafter(
            made, target(), tokenizer(), texts(30), out, plan(every=0), batch=160, how=Responding(9), report=print,
            texts=texts(20, 5), share=0.3,
        )  # fmt: skip


def test_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """To the bit, with other texts mixed in."""
    mixed: dict[str, Any] = dict(texts=texts(20, 5), share=0.3)
    whole, best = trained(tmp_path / "whole", plan=plan(every=0), **mixed)
    _interrupted(tmp_path / "cut", 7)
    state = read_state(tmp_path / "cut")
    assert state is not None and state["steps"] == 7
    again, figures = trained(tmp_path / "cut", plan=plan(every=0), resume=True, **mixed)
    for a, b in zip(whole.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert figures == best
    folders = [safetensors.torch.load_file(tmp_path / name / WEIGHTS) for name in ("whole", "cut")]
    assert all(torch.equal(weight, folders[1][name]) for name, weight in folders[0].items())


def test_the_best_checkpoint_is_kept_and_continued_without_a_state(tmp_path: Path) -> None:
    reached = [1.0]
    for tried, lr in enumerate(
        (0.3, 1.0, 3.0, 10.0)
    ):  # until steps at the end spoil the drafter: bits differ by processor
        if reached[-1] == max(reached):
            tmp_path = tmp_path / str(tried)
            made, figures = trained(tmp_path, plan=plan(every=0, steps=40, lr=lr))
            reached = [json.loads(line)["tokens_per_pass"] for line in (tmp_path / LOG).read_text().splitlines()]
    assert figures["tokens_per_pass"] == max(reached) > reached[-1], "no step spoils the drafter"
    kept = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert not torch.equal(kept["model.embed_tokens.weight"], made.module.model.embed_tokens.weight)
    (tmp_path / STATE).unlink()
    again, later = trained(tmp_path, plan=plan(steps=1, lr=1e-9), resume=True)
    assert later["tokens_per_pass"] == pytest.approx(max(reached), abs=0.002)
    torch.testing.assert_close(dict(again.module.state_dict()), dict(kept), rtol=0, atol=1e-6)
    (tmp_path / STATE).unlink()
    with pytest.raises(Refused, match="--resume: the checkpoint is of a draft model with another head_dim, num_att"):
        trained(tmp_path, resume=True, heads=4)  # its weights have the same shapes
    with pytest.raises(Refused, match="holds a checkpoint: go on from it with --resume"):
        trained(tmp_path)


def test_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, write = 2, PreTrainedModel.save_pretrained

    def written(self: Any, folder: Any, **options: Any) -> None:
        nonlocal left
        left -= 1
        write(self, folder, **options)
        if left < 0:
            (Path(folder) / WEIGHTS).write_bytes(b"half")
            raise safetensors.SafetensorError("IoError: No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", written)
    with pytest.raises(Refused, match=r"No space left on device.*the last checkpoint is kept: make room") as refused:
        trained(tmp_path, plan=plan(every=0, lr=1e-9))
    assert "\n" not in str(refused.value)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_given_model_is_continued_over_the_tokens_that_both_have(tmp_path: Path) -> None:
    """Here one with padded embeddings, whose padding the target has not."""
    model = target()
    student = copy.deepcopy(models.sibling(model)).float()
    student.resize_token_embeddings(models.V + 3, mean_resizing=False)
    student.save_pretrained(tmp_path / "given")
    tokenizer().save_pretrained(tmp_path / "given")
    made = learner(model, model=str(tmp_path / "given"), loss_name="kl")
    assert made.lr == 3e-4 < learner().lr
    with torch.no_grad():
        torch.testing.assert_close(
            made.module(torch.tensor([[5, 6]])).logits, student(torch.tensor([[5, 6]])).logits, rtol=1e-4, atol=1e-4
        )
    lines = responded(model, 3)
    expected = []
    with torch.no_grad():
        for prompt, response in lines:
            ids = torch.tensor([prompt + response])
            p, q = (
                m(ids).logits[0, len(prompt) - 1 : -1, : models.V].double().log_softmax(-1) for m in (model, student)
            )
            expected.append((p.exp() * (p - q)).sum(-1))
    assert made.loss(batch_of(model, lines)).item() == pytest.approx(float(torch.cat(expected).mean()), rel=1e-4)


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    model = target()
    other = copy.deepcopy(tokenizer())
    other.add_tokens(["another"])
    models.sibling(model).save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    with pytest.raises(Refused, match="has another tokenizer than the target"):
        learner(model, model=str(tmp_path))
    with pytest.raises(Refused, match="continued in its own shape: leave layers="):
        learner(model, model=models.sibling(model), width=8)
    with pytest.raises(Refused, match="is no decoder language model: draft models are trained for these"):
        learner(seq2seq_models.model())
    with pytest.raises(Refused, match=r"there is no LlamaForCausalLM of that shape .* give other layers="):
        learner(model, width=15, heads=3)  # heads of five numbers, which cannot be rotated
    with pytest.raises(Refused, match="draft-model:loss_name='mse': give one of ce, kl"):
        learner(model, loss_name="mse")


def test_texts_are_mixed_with_responses() -> None:
    """A fixed share of lines, all lines of both sides in turn, continued where it was."""
    lines: list[Line] = [([9], [10 + i % 20] * 3) for i in range(50)]
    others: list[Line] = [([8], [40 + i % 20] * 3) for i in range(20)]
    read = Reader(target(), ())
    feed = Feed(lines, 32, 5, read, texts=others, share=0.25)
    batches = [next(feed).ids for _ in range(400)]
    heads = torch.cat(batches)[:, 0].tolist()
    assert heads.count(8) / len(heads) == pytest.approx(0.25, abs=0.03)
    seen = torch.cat(batches)[:, 1].tolist()
    assert set(seen) == set(range(10, 30)) | set(range(40, 60))
    later = Feed(lines, 32, 5, read, 150, others, 0.25)
    assert all(torch.equal(next(later).ids, ids) for ids in batches[150:200])


def test_command_trains_a_draft_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, data, other, out = (tmp_path / name for name in ("target", "lines.txt", "texts.txt", "out"))
    target().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    data.write_text("\n".join(texts(20)))
    other.write_text("\n".join(texts(9, 4)))
    base = ["train", "draft-model:layers=1,width=16,loss_name=tvd++", "--target", str(folder), "--data", str(data)]
    options = ["--minutes", "0.01", "--max-new-tokens", "9", "--out", str(out)]
    assert main([*base, *options, "--texts", str(other), "--text-share", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert f"use it as --draft draft-model:{out}" in printed and "16 lines and 8 texts to train on, 4 held" in printed
    again = ["train", f"draft-model:{out}", *base[2:], "--minutes", "0.01", "--labels", "given", "--out"]
    assert main([*again, str(tmp_path / "next")]) == 0, "what was trained is continued"
    capsys.readouterr()
    for changes, message in (
        (["--text-share", "0"], "--text-share 0.0: give a number above 0 and below 1"),
        (["--text-share", "0.5"], "--text-share: there are no --texts to draw from"),
        (["--texts", str(tmp_path / "none")], "none cannot be read"),
    ):
        assert main([*base, *options[:-1], str(tmp_path / "x"), *changes]) == 2
        assert message in capsys.readouterr().err
