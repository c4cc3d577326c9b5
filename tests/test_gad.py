"""gad: its state of rows, its training, its checkpoints, the command that trains it, and its lossy rule."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerFast

import models as decoders
import truedraft
from test_seq2seq import both, early, sources, tiny
from truedraft import Refused, registry
from truedraft.cli import main
from truedraft.drafters._learned import VERSION, WEIGHTS, read_learnt
from truedraft.drafters._trees import likeliest_paths
from truedraft.runtime import native
from truedraft.stores import _file as store
from truedraft.train.batches import Line, SourceReader, pad_to
from truedraft.train.checkpoints import STATE
from truedraft.train.drafter import train_drafter
from truedraft.train.loop import Plan, fit

WORDS, END = 30, 2
KNOBS = dict(k=6, layers=1)


def learner(**knobs: Any) -> Any:
    return registry.method("drafters", "gad").learner(**{**KNOBS, **knobs})


def untrained(model: PreTrainedModel, **knobs: Any) -> Any:
    made = learner(**knobs)
    made.begin(model)
    return made.module


def translated(words: list[int]) -> list[int]:
    """The toy language: every word is replaced by another, in the same order."""
    return [3 + (word - 3 + 7) % WORDS for word in words]


def sentences(seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(3, 3 + WORDS) for _ in range(rng.randrange(4, 11))]


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model that translates the toy language, trained in seconds, and its tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(
        CONFIG_MAPPING["pegasus"](
            vocab_size=3 + WORDS, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64,
            pad_token_id=0, eos_token_id=END, decoder_start_token_id=0, forced_eos_token_id=None, dropout=0.0,
        )
    )  # fmt: skip
    data = sentences(0)

    def groups() -> Iterator[list[Line]]:
        while True:
            group = [next(data) for _ in range(32)]
            yield [([*words, END], [*translated(words), END]) for words in group]

    def loss(group: list[Line]) -> torch.Tensor:
        ids, labels = pad_to([a for a, _ in group], 0), pad_to([b for _, b in group], -100)
        return model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss

    plan, log = Plan(steps=350, lr=1e-2, warmup=20), tmp_path_factory.mktemp("toy") / "log"
    fit(model, loss, groups(), plan, validate=dict, save=lambda run: None, log=log)
    words = {word: i for i, word in enumerate(["<pad>", "<unk>", "</s>", *(f"w{i}" for i in range(WORDS))])}
    made = Tokenizer(models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", END)])
    marks = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return model.eval(), PreTrainedTokenizerFast(tokenizer_object=made, **marks)


def lines(count: int, seed: int = 1) -> list[str]:
    data = sentences(seed)
    return [" ".join(f"w{word - 3}" for word in next(data)) for _ in range(count)]


@pytest.fixture(scope="session")
def checkpoint(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of seconds of training on the toy."""
    out = tmp_path_factory.mktemp("gad") / "run"
    plan = Plan(steps=150, lr=1e-2, warmup=20)
    figures = train_drafter(learner(), *toy, lines(400), out, plan, batch=512)
    assert figures["tokens_per_pass"] > 2
    return out


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_trained_drafter_saves_passes_and_changes_no_token(toy: Any, checkpoint: Path, sample: bool) -> None:
    model, tokenizer = toy
    inputs = tokenizer(lines(12, seed=5), return_tensors="pt", padding=True, return_token_type_ids=False)
    reached = []
    for draft in (f"gad:model={checkpoint}", registry.load("drafters", "gad", model=untrained(model))):
        fast = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed")
        torch.manual_seed(3)
        expected = model.generate(**inputs, max_new_tokens=20, do_sample=sample)
        torch.manual_seed(3)
        assert torch.equal(fast.generate(**inputs, max_new_tokens=20, do_sample=sample), expected)
        reached.append(fast.report().mean_acceptance_length)
    trained, chance = reached
    assert chance < 1.3 and trained > 2


def test_evaluation_equals_decoding(toy: Any, checkpoint: Path) -> None:
    """Evaluation on a line's own response gives the number of passes of decoding, one line at a time."""
    model, tokenizer = toy
    fast = truedraft.accelerate(model, tokenizer, draft=f"gad:model={checkpoint}", control="fixed")
    again, held, passes, tokens = learner(), [], 0, 0
    again.begin(model)
    again.module = fast.drafter._filler
    for line in lines(9, seed=8):
        ids = tokenizer(line)["input_ids"]
        out = fast.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
        held.append((ids, out[0].tolist()))
        passes, tokens = passes + len(fast.report().passes), tokens + fast.report().tokens
    assert again.evaluate([SourceReader(model, ())(held)])["tokens_per_pass"] == pytest.approx(
        tokens / passes, abs=1e-3
    )


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_incremental_drafts_equal_those_from_the_whole_row(
    kind: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft equals that of a filler that reads the row from its beginning, alone, after other rows left."""
    model = tiny(kind)
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    made = learner(layers=2)
    made.begin(model)
    draft = registry.load("drafters", "gad", model=made.module)
    given, compared, read = sources(), 0, SourceReader(model, ())
    propose = draft.propose

    def checked(rows: Any, budget: Any) -> Any:
        nonlocal compared
        trees = propose(rows, budget if compared % 3 else [0] * len(rows))  # sometimes without a draft
        for row, tree in zip(rows, trees, strict=True):
            length = int(given["attention_mask"][row.index].sum())
            source = given["input_ids"][row.index, :length].tolist()
            with torch.no_grad():
                filled = made._filled(read([(source, row.tokens)]), torch.tensor([[len(row.tokens)]]))
            assert list(tree.tokens[1:]) == filled.argmax(-1).flatten().tolist()[: len(tree) - 1]
            assert len(tree) in (1, 7) or tree.tokens[-1] in row.ends
        compared += 1
        return trees

    monkeypatch.setattr(draft, "propose", checked)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    expected, found = both(fast, **early(model))
    assert torch.equal(expected, found) and compared > 5
    assert (made.module.compiled is not None) == (compiled and native.library() is not None)
    assert len({len(row[row != 0]) for row in found}) > 1, "rows leave at different times"


def test_tree_has_the_likeliest_paths() -> None:
    """Against an enumeration of all paths; in order, and none below an end token."""
    generator = torch.Generator().manual_seed(2)
    chances = torch.rand(4, 3, generator=generator).softmax(-1).sort(-1, descending=True).values.tolist()
    tokens = [[10 * place + rank for rank in range(3)] for place in range(4)]
    scores = {(): 1.0}
    for place in range(4):
        for path, value in list(scores.items()):
            if len(path) == place and 11 not in path:
                scores |= {(*path, token): value * chances[place][rank] for rank, token in enumerate(tokens[place])}
    expected = sorted(scores, key=scores.__getitem__, reverse=True)[:21]
    tree = likeliest_paths(7, tokens, chances, 20, frozenset({11}))
    found = [tuple(tree.tokens[node] for node in tree.path(i)[1:]) for i in range(len(tree))]
    assert found == expected
    assert likeliest_paths(7, [[3], [4], [5]], [[0.5], [0.4], [0.3]], 9, frozenset({4})).tokens == (7, 3, 4)


def test_training_begins_anew_from_a_checkpoint(toy: Any, checkpoint: Path, tmp_path: Path) -> None:
    """From weights alone, without the state of their run."""
    shutil.copy(checkpoint / WEIGHTS, tmp_path)
    shutil.copytree(checkpoint / "responses", tmp_path / "responses")
    with pytest.raises(Refused, match="it was not trained there, so give another folder"):
        train_drafter(learner(), *toy, lines(400), tmp_path, Plan(steps=1))
    before = (tmp_path / WEIGHTS).read_bytes()
    figures = train_drafter(learner(), *toy, lines(400), tmp_path, Plan(steps=3, lr=5.0, warmup=1), resume=True)
    assert figures["tokens_per_pass"] > 2 and (tmp_path / WEIGHTS).read_bytes() == before, "a worse one was kept"
    with pytest.raises(Refused, match=r"is complete after .* remove training.pt there"):
        train_drafter(learner(), *toy, lines(400), tmp_path, Plan(steps=3), resume=True)
    (tmp_path / STATE).unlink()
    train_drafter(learner(), *toy, lines(400), tmp_path, Plan(steps=30, lr=1e-2, warmup=5), resume=True)
    assert (tmp_path / WEIGHTS).read_bytes() != before
    with pytest.raises(Refused, match=r"not .*'layers': 3"):
        train_drafter(learner(layers=3), *toy, lines(400), tmp_path, Plan(steps=1), resume=True)
    (tmp_path / STATE).unlink()
    with pytest.raises(Refused, match=r"responses.00000.safetensors' holds responses to other lines"):
        train_drafter(learner(), *toy, lines(9), tmp_path, Plan(steps=1), resume=True)
    with pytest.raises(Refused, match="there is no checkpoint"):
        train_drafter(learner(), *toy, lines(9), tmp_path / "new", Plan(steps=1), resume=True)


def test_responses_are_those_of_the_model(toy: Any, checkpoint: Path) -> None:
    from truedraft.train.responses import Responding, target_responses

    model, tokenizer = toy

    def unused(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was called again")

    fast = truedraft.accelerate(model, tokenizer)
    fast.generate = unused  # type: ignore[method-assign, assignment]
    kept = target_responses(fast, tokenizer, lines(400), checkpoint, print, Responding())
    assert len(kept) == 400
    for source, answer in kept[::40]:
        assert torch.equal(model.generate(torch.tensor([source]), max_new_tokens=20), torch.tensor([answer]))


def test_lines_without_trainable_pairs_are_refused(toy: Any, tmp_path: Path) -> None:
    long, reports = " ".join(["w1"] * 130), []
    knobs: dict[str, Any] = dict(out=tmp_path / "run", plan=Plan(steps=1), report=reports.append)
    for answers in (["", ""], [long, long]):
        with pytest.raises(Refused, match="every line has a side that is empty or longer than 64 tokens"):
            train_drafter(learner(), *toy, ["w1", "w2"], answers=answers, **knobs)
    with pytest.raises(Refused, match="no line of 1 to 64 tokens"):
        train_drafter(learner(), *toy, [long], **knobs)
    train_drafter(learner(), *toy, ["w1", "w2", "w3"], answers=["w2", long, "w1"], **knobs)
    assert "1 lines have a side that is empty or longer" in reports[0]


def test_interrupted_responses_are_not_kept(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from truedraft.train.responses import Responding, target_responses

    def pressed(_: Any) -> None:
        raise KeyboardInterrupt

    fast = truedraft.accelerate(*toy, draft=None)
    monkeypatch.setattr(fast, "generate", partial(fast.generate, on_pass=pressed))
    with pytest.raises(KeyboardInterrupt):
        target_responses(fast, toy[1], lines(9), tmp_path, print, Responding())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("lacks", "named"), [("weights", "Missing key"), ("shape", "masks")])
def test_incomplete_checkpoint_of_gad_is_refused(
    lacks: str, named: str, toy: Any, checkpoint: Path, tmp_path: Path
) -> None:
    config, weights = read_learnt(checkpoint, "gad", toy[0])
    arrays = {f"{name}s": weight.numpy() for name, weight in weights.items()}
    if lacks == "shape":
        del config["shape"]["masks"]
    store.write(tmp_path / WEIGHTS, "gad drafter", VERSION, config, arrays)
    with pytest.raises(Refused, match=f"does not hold the weights that it describes .*{named}"):
        truedraft.accelerate(toy[0], draft=f"gad:model={tmp_path}")


def test_invalid_targets_and_checkpoints_are_refused(toy: Any, checkpoint: Path, tmp_path: Path) -> None:
    model, _ = toy
    with pytest.raises(Refused, match="needs a checkpoint"):
        truedraft.accelerate(model, draft="gad")
    with pytest.raises(Refused, match="this model has no encoder"):
        truedraft.accelerate(decoders.tiny(), draft=f"gad:model={checkpoint}")
    with pytest.raises(Refused, match="there is no folder '/no/such'"):
        truedraft.accelerate(model, draft="gad:model=/no/such")
    with pytest.raises(Refused, match="there is no such file"):
        truedraft.accelerate(model, draft=f"gad:model={tmp_path}")
    with pytest.raises(Refused, match="was trained for another model"):
        truedraft.accelerate(tiny("bart"), draft=f"gad:model={checkpoint}")
    with pytest.raises(Refused, match="trained with 6 masks"):
        truedraft.accelerate(model, draft=f"gad:model={checkpoint},length=7")
    whole = (checkpoint / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:-9] + bytes(9))
    with pytest.raises(Refused, match="is damaged"):
        truedraft.accelerate(model, draft=f"gad:model={tmp_path}")
    config, arrays, _ = store.read(checkpoint / WEIGHTS, "gad drafter", VERSION, "")
    for changes in ({"shape": {"masks": 6}}, {"shape": {**config["shape"], "masks": 5}}, {"shape": None}):
        store.write(tmp_path / WEIGHTS, "gad drafter", VERSION, config | changes, arrays)
        with pytest.raises(Refused, match="does not hold the weights that it describes"):
            truedraft.accelerate(model, draft=f"gad:model={tmp_path}")
    other = CONFIG_MAPPING["pegasus"](**{**model.config.to_dict(), "pad_token_id": 0})
    torch.manual_seed(4)
    with pytest.raises(Refused, match="was trained for another model"):
        other.decoder_layers = other.num_hidden_layers = other.encoder_layers = 3
        unrelated = AutoModelForSeq2SeqLM.from_config(other).eval()
        truedraft.accelerate(unrelated, draft=f"gad:model={checkpoint}")


def test_command_trains_and_refuses(toy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = toy
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    data, out = tmp_path / "lines.txt", tmp_path / "out"
    data.write_text("\n".join([*lines(50), "", "w1 w2\tw8 w9"]))
    base = ["train", "gad:k=4,layers=1", "--target", str(tmp_path / "model"), "--out", str(out), "--minutes", "0.01"]
    assert main([*base, "--data", str(data), "--batch", "256"]) == 0
    assert f"--draft gad:{out}" in capsys.readouterr().out
    truedraft.accelerate(model, tokenizer, draft=f"gad:model={out}").generate(torch.tensor([[4, 5, END]]))
    (tmp_path / "empty.txt").write_text("\n\n")
    decoder = decoders.tiny("llama", torch.float32)
    for part in (decoder, tokenizer):
        part.save_pretrained(tmp_path / "decoder")
    for args, message in (
        ([*base, "--data", str(data)], "go on from it with --resume"),
        ([*base, "--data", str(tmp_path / "none.txt")], "none.txt cannot be read"),
        ([*base, "--data", str(tmp_path / "empty.txt")], "the file has no text"),
        ([*base, "--data", str(data), "--labels", "given"], "line 1 has no tab"),
        ([*base, "--data", str(data), "--labels", "mine"], "choose target or given"),
        ([*base[:-1], "0", "--data", str(data)], "--minutes 0.0: give a number above 0"),
        ([*base, "--data", str(data), "--threads", "0"], "--threads 0: this machine has"),
        (
            ["train", "llma", *base[2:], "--data", str(data)],
            "llma has nothing to learn: train one of dflash, draft-model, eagle, eagle2, eagle3,",
        ),
        (["train", "gad:j=4", *base[2:], "--data", str(data)], "the training of gad has no knob 'j'"),
        (["train", "gad:k=0", *base[2:], "--data", str(data)], "gad:k=0: give a whole number, 1 to 64"),
        ([*base[:3], str(tmp_path / "decoder"), *base[4:], "--data", str(data)], "is not an encoder-decoder"),
    ):
        assert main(args) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and message in error


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_gad_plus_plus_is_greedy_at_its_strictest(kind: str) -> None:
    """The lossy rule of the paper: at beta 1, or tau 0, the text of `model.generate`; always labelled."""
    model = tiny(kind)
    noisy = registry.load("drafters", "gad", model=untrained(model))
    for knobs in ("beta=1", "gap=0.0"):
        fast = truedraft.accelerate(model, draft=noisy, rule=f"lossy/top-beta:{knobs}", control="fixed")
        expected, found = both(fast, do_sample=False)
        assert torch.equal(expected, found)
        noisy_rate = fast.report().acceptance_rate
        assert fast.report().guarantee == "none" and "is lossy" in str(fast.report())
    with pytest.raises(Refused, match="beta=0"):
        registry.load("accept", "lossy/top-beta:beta=0")
    lax = truedraft.accelerate(model, draft=noisy, rule="lossy/top-beta:beta=61,gap=1e9", control="fixed")
    lax.generate(**sources(), max_new_tokens=21, min_new_tokens=20, do_sample=False)
    assert lax.report().acceptance_rate > 0.9 > 0.5 > noisy_rate
