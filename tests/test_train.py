"""Training of drafters for decoders: batches, responses, runs that are interrupted, and the command."""

from __future__ import annotations

import copy
import errno
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import safetensors.numpy
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import models
import truedraft
from truedraft import Refused
from truedraft.bench.plots import Panel, picture
from truedraft.cli import main
from truedraft.drafters._learned import WEIGHTS, Batch, Learner, Metrics, read_learnt
from truedraft.train import drafter, loop, responses
from truedraft.train.batches import Feed, Line, Reader, both_sides, mixed, shuffled, sorted_groups
from truedraft.train.checkpoints import STATE, read_state
from truedraft.train.curves import drawn
from truedraft.train.drafter import CURVES, LOG, train_drafter
from truedraft.train.loop import Muon, Plan, Run
from truedraft.train.responses import Responding, given_responses, target_responses
from truedraft.tree import Taps

END = 7
CHAT = "{% for m in messages %}w58 {{ m['content'] }} w59 {% endfor %}{% if add_generation_prompt %}w60{% endif %}"


@pytest.fixture(autouse=True)
def _many_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line in five, as there are few."""
    monkeypatch.setattr(drafter, "HELD_OUT", 5)


def target() -> PreTrainedModel:
    """A tiny decoder whose responses end after different lengths; V is 61, its context 128."""
    model = copy.deepcopy(models.tiny("llama", torch.float32))
    model.generation_config.eos_token_id = END
    return model


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """`w5` is the token 5; 0 is padding."""
    words = {"<pad>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, models.V)}}
    made = Tokenizer(tokenizer_models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>")
    found.chat_template = CHAT
    return found


def texts(count: int, seed: int = 0, longest: int = 12) -> list[str]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=g).tolist()
    return [" ".join(f"w{t}" for t in torch.randint(8, models.V, (n,), generator=g).tolist()) for n in lengths]


def ids_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


@dataclass
class Guess(Learner):
    """A linear head on layer -1 that predicts the next token."""

    name: ClassVar[str] = "guess"
    fails: Callable[[int], bool] = lambda step: False  # whether the loss of a step is NaN
    calls: int = 0

    def begin(self, model: PreTrainedModel) -> None:
        self.module = nn.Sequential(nn.Linear(model.config.hidden_size, model.config.vocab_size))
        self.needs = Taps((-1,))
        self.counts: Tensor | None = None

    def prepare(self, counts: Tensor) -> None:
        self.counts = counts

    def _compared(self, batch: Batch) -> tuple[Tensor, Tensor]:
        states = dropout(batch.features[-1][:, :-1], 0.1, self.module.training)
        counted = batch.loss_mask[:, 1:]
        return self.module(states)[counted], batch.ids[:, 1:][counted]

    def loss(self, batch: Batch) -> Tensor:
        self.calls += 1
        value = cross_entropy(*self._compared(batch))
        return value * float("nan") if self.fails(self.calls) else value

    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        torch.rand(3)  # evaluations may draw random numbers
        right = total = 0
        for batch in batches:
            logits, labels = self._compared(batch)
            right, total = right + int((logits.argmax(-1) == labels).sum()), total + len(labels)
        return {"tokens_per_pass": 1 + right / total, "acceptance": [right / total]}

    def config(self) -> dict[str, Any]:
        return {}

    def resume(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.module.load_state_dict(weights)


def plan(**changes: Any) -> Plan:
    """Limited by steps; validated after every step where `every` is 0."""
    return Plan(**{"minutes": 1e6, "steps": 12, "lr": 3e-2, "warmup": 2, "every": 1e6, **changes})


def trained(out: Path, learner: Guess | None = None, **knobs: Any) -> tuple[Guess, dict[str, float]]:
    """A learner that is trained on a few short responses."""
    learner = Guess() if learner is None else learner
    defaults: dict[str, Any] = dict(plan=plan(), batch=160, how=Responding(9), report=lambda text: None)
    torch.manual_seed(4)
    sources = knobs.pop("sources", texts(30))
    return learner, train_drafter(learner, target(), tokenizer(), sources, out, **{**defaults, **knobs})


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "opt", "mixtral"])
def test_features_equal_those_of_each_text_alone(architecture: str) -> None:
    """At every position of rows of different lengths, padding excepted; the last layer before its norm included."""
    model = models.tiny(architecture, torch.float32)
    lines: list[Line] = [([5, 9, 11], [8, 30, 31, 32, 33]), ([40], [12, 13]), (list(range(10, 30)), [3] * 12)]
    batch = Reader(model, (0, 1, 2, -1))(lines)
    raw: list[Tensor] = []
    decoder: Any = model.get_decoder()
    block = next(m for m in decoder.modules() if isinstance(m, nn.ModuleList))[-1]
    hook = block.register_forward_hook(lambda m, i, out: raw.append(out if isinstance(out, Tensor) else out[0]))
    for row, (prompt, response) in enumerate(lines):
        text = prompt + response
        assert batch.ids[row, : len(text)].tolist() == text
        assert batch.mask[row].tolist() == [True] * len(text) + [False] * (32 - len(text))
        with torch.no_grad():
            alone = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        for layer, expected in {0: alone[0], 1: alone[1], 2: raw[-1], -1: alone[-1]}.items():
            found = batch.features[layer][row, : len(text)]
            assert found.dtype == torch.float32 and torch.allclose(found, expected[0], atol=2e-5, rtol=1e-4), layer
    hook.remove()
    assert batch.source is None and not (raw[-1] == alone[-1]).all()


def test_loss_mask_has_the_response_alone() -> None:
    batch = Reader(target(), ())([([5, 9, 11], [8, 30]), ([40], [12, 13, 14, 15])])
    assert batch.loss_mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
    assert batch.mask.int().tolist() == [[1, 1, 1, 1, 1]] * 2 and batch.features == {}
    parts = list(Reader(target(), (1,))([([5], [8]), ([6], [9]), ([7], [3])]).split(2))
    assert [part.ids.tolist() for part in parts] == [[[5, 8], [6, 9]], [[7, 3]]]
    assert [part.features[1].shape for part in parts] == [(2, 2, 32), (1, 2, 32)]


def test_a_layer_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(Refused, match="layer"):
        Reader(target(), (9,))


def test_groups_hold_every_line_within_their_size() -> None:
    lines: list[Line] = [(ids_of(a), ids_of(b)) for a, b in zip(texts(80, 1), texts(80, 2), strict=True)]
    long: Line = ([9] * 70, [8] * 30)
    groups = list(sorted_groups([*lines, long], 64, both_sides))
    assert sorted(line for group in groups for line in group) == sorted([*lines, long])
    assert groups[-1] == [long]
    for group in groups[:-1]:
        assert max(map(both_sides, group)) * len(group) <= 64
    assert len(groups) < sum(map(both_sides, lines)) / 40, "they are filled"


def test_a_feed_continues_where_it_was() -> None:
    lines: list[Line] = [([9], ids_of(text)) for text in texts(50, 3)]
    read = Reader(target(), ())
    whole = Feed(lines, 64, 5, read)
    first = [next(whole).ids for _ in range(40)]
    later = Feed(lines, 64, 5, read, drawn=23)
    assert later.tokens == sum(int((ids[:, 1:] != 0).sum()) for ids in first[:23])
    for ids in first[23:]:
        assert torch.equal(next(later).ids, ids)
    assert later.tokens == whole.tokens and later.drawn == whole.drawn == 40
    other = Feed(lines, 64, 6, read)
    assert [ids.tolist() for ids in first] != [next(other).ids.tolist() for _ in range(40)]


# ---------------------------------------------------------------- responses


def test_lines_are_drawn_as_often_as_their_weights() -> None:
    """Of 400 rounds, each line as often as its weight, with a mean of 1; texts that are mixed in have none."""
    items: list[Line] = [([i], [i]) for i in range(4)]
    weights = drafter.scaled([0.0, 1.0, 2.0, 5.0])
    assert weights == [0.0, 0.5, 1.0, 2.5]
    drawn = Counter(line[0][0] for line in islice(shuffled(items, 3, weights), 1600))
    assert [drawn[i] / 400 for i in range(4)] == pytest.approx(weights, abs=0.06)
    for even in (shuffled(items, 3), shuffled(items, 3, [1.0] * 4)):
        assert sorted(islice(even, 4)) == sorted(islice(even, 4)) == items
    others = Counter(line[0][0] for line in islice(mixed(items, [([9], [9])], 0.5, 1, weights), 2000))
    assert others[0] == 0 and others[9] == pytest.approx(1000, abs=80)
    with pytest.raises(Refused, match="--weights: all lines to train on have the weight 0"):
        drafter.scaled([0.0, 0.0])


def test_weights_are_those_of_the_lines_that_are_kept(tmp_path: Path) -> None:
    """Lines without weight are not trained on, wherever other lines were left out: here the first of three."""
    seen: list[list[int]] = []

    class Seen(Guess):
        def loss(self, batch: Batch) -> Tensor:
            seen.extend([row[row != 0].tolist() for row in batch.ids])
            return super().loss(batch)

    sources = [text for _ in range(10) for text in ("", "w9", "w11")]
    answers = [text for _ in range(10) for text in ("w9", "w10", "w12")]
    trained(tmp_path, Seen(), sources=sources, answers=answers, weights=[5.0, 0.0, 1.0] * 10)
    assert {tuple(ids) for ids in seen} == {(11, 12, END)}


def test_few_lines_are_held_out_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty lines, but at most a tenth, and at most MOST."""
    monkeypatch.setattr(drafter, "HELD_OUT", 100)
    held = {count: len(drafter.held_out(range(count))[0]) for count in (50, 200, 500, 2000, 5000, 40000)}
    assert held == {50: 5, 200: 20, 500: 20, 2000: 20, 5000: 50, 40000: 200}
    for count in (1, 50, 2000):
        parts = drafter.held_out(range(count))
        assert sorted({*parts[0], *parts[1]}) == [*range(count)] and (count == 1 or not {*parts[0]} & {*parts[1]})


def test_responses_are_those_of_the_model_alone(tmp_path: Path) -> None:
    model, prompts = target(), texts(20)
    fast = truedraft.accelerate(model, tokenizer(), draft=None)
    found = target_responses(fast, tokenizer(), prompts, tmp_path, print, Responding(30))
    lengths = set()
    for prompt, (ids, response) in zip(prompts, found, strict=True):
        assert ids == ids_of(prompt)
        alone = model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)[0, len(ids) :].tolist()
        assert response == alone
        lengths.add(len(response))
    assert len(lengths) > 3 and min(lengths) < 30


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_interrupted_responses_are_continued(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "PART", 6)
    monkeypatch.setattr(responses, "ROWS", 4)
    how, prompts = Responding(9, temperature=temperature), texts(20)

    def run(folder: Path, **changes: Any) -> list[Line]:
        fast = truedraft.accelerate(target(), tokenizer(), draft=None)
        generate, left = fast.generate, changes.get("calls", 1000)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return generate(*args, **kwargs)

        fast.generate = counted  # type: ignore[method-assign]
        found = target_responses(fast, tokenizer(), prompts, folder, print, changes.get("how", how))
        if "calls" in changes:
            assert left == 0
        return found

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", calls=5)
    assert sorted(path.name for path in (tmp_path / "cut").rglob("*.*")) == ["00000.safetensors", "00001.safetensors"]
    assert run(tmp_path / "cut", calls=3) == whole, "six lines of two batches, then two"
    assert run(tmp_path / "cut", calls=0) == whole
    other = Responding(9, temperature=temperature or 0.8, seed=1)
    with pytest.raises(Refused, match=r"00000.safetensors' holds responses by other settings: remove its folder"):
        run(tmp_path / "cut", how=other)
    assert run(tmp_path / "other", how=other) != whole


def test_responses_do_not_depend_on_the_size_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a batch does not fit in memory, and has to be halved."""
    how, prompts = Responding(9, temperature=0.8), texts(20)
    fast = truedraft.accelerate(target(), tokenizer(), draft=None)
    expected = target_responses(fast, tokenizer(), prompts, tmp_path / "a", print, how)
    generate, refused = fast.generate, 0

    def small(given: Tensor, **kwargs: Any) -> Any:
        nonlocal refused
        if len(given) > 3:
            refused += 1
            raise truedraft.errors.NoRoom("too many")
        return generate(given, **kwargs)

    fast.generate = small  # type: ignore[method-assign, assignment]
    assert target_responses(fast, tokenizer(), prompts, tmp_path / "b", print, how) == expected and refused > 2
    monkeypatch.setattr(responses, "POSITIONS", 60)
    refused = 0
    assert target_responses(fast, tokenizer(), prompts, tmp_path / "c", print, how) == expected and refused == 0


def test_long_prompts_and_texts_are_cut(tmp_path: Path) -> None:
    """The context is 128: a prompt keeps its end, with room for a response; a given text its beginning."""
    fast = truedraft.accelerate(target(), tokenizer(), draft=None)
    numbers = [8 + i % 50 for i in range(200)]
    long = " ".join(f"w{i}" for i in numbers)
    (prompt, response), short = target_responses(fast, tokenizer(), [long, "w9"], tmp_path, print, Responding(20))
    assert prompt == numbers[-108:] and 0 < len(response) <= 20 and short[0] == [9]
    (cut,) = target_responses(fast, tokenizer(), [long], tmp_path / "b", print, Responding(20, max_length=12))
    assert cut[0] == numbers[-6:] and 0 < len(cut[1]) <= 6
    reports: list[str] = []
    given = given_responses(
        fast, tokenizer(), [long, "w9 w10", "w8", long], [None, "w11 w12", None, "w9"], reports.append, Responding()
    )
    assert given == [(numbers[:1], numbers[1:128]), ([9, 10], [11, 12, END])]
    why = "nothing to predict within 128 tokens, or a single token, and drafts begin with the second"
    assert reports == [f"--data: 2 lines have {why}: left out"]
    with pytest.raises(Refused, match="--data: every line has nothing to predict within 128 tokens"):
        given_responses(fast, tokenizer(), ["w8"], [None], print, Responding())


def test_prompts_are_put_into_the_chat_template(tmp_path: Path) -> None:
    fast = truedraft.accelerate(target(), tokenizer(), draft=None)
    how = Responding(5, chat=True)
    ((prompt, _),) = target_responses(fast, tokenizer(), ["w9 w10"], tmp_path, print, how)
    assert prompt == [58, 9, 10, 59, 60]
    given = given_responses(fast, tokenizer(), ["w9", "w20 w21 w22"], ["w11", None], print, how)
    assert given == [([58, 9, 59, 60], [11, END]), ([20], [21, 22])]
    plain = copy.deepcopy(tokenizer())
    plain.chat_template = None
    with pytest.raises(Refused, match="--chat: the tokenizer of this model has no chat template"):
        target_responses(fast, plain, ["w9"], tmp_path / "b", print, how)


# ---------------------------------------------------------------- runs


def test_training_learns_and_leaves_the_target_alone(tmp_path: Path) -> None:
    model = target()
    before = copy.deepcopy(model.state_dict())
    learner = Guess()
    figures = train_drafter(
        learner, model, tokenizer(), texts(200), tmp_path, plan(steps=80), batch=400, how=Responding(9), report=print
    )
    assert figures["tokens_per_pass"] > 1.3, "a draft of chance is right once in 61 times"
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    fast = truedraft.accelerate(model, tokenizer(), draft=None)
    lines = target_responses(fast, tokenizer(), texts(200), tmp_path, print, Responding(9))
    counts = torch.tensor([t for i, (_, response) in enumerate(lines) if i % 5 for t in response]).bincount(
        minlength=models.V
    )
    assert learner.counts is not None and torch.equal(learner.counts, counts), "those of the lines not held out"
    rows = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [row["steps"] for row in rows] == [80] and rows[0].keys() == {
        "minutes", "steps", "loss", "tokens", "tokens_per_pass", "acceptance",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {WEIGHTS, STATE, LOG, CURVES, "responses"}


def _interrupted(out: Path, **knobs: Any) -> None:
    """A run that is cancelled in its eighth step, two steps after its last validation but one."""

    def cancelled(call: int) -> bool:
        if call == 8:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        trained(out, Guess(cancelled), plan=plan(every=0), **knobs)


def test_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """To the bit: weights, optimizers, order of the data, dropout, learning rates, log."""
    whole, best = trained(tmp_path / "whole", plan=plan(every=1e6))
    _interrupted(tmp_path / "cut")
    state = read_state(tmp_path / "cut")
    assert state is not None and state["steps"] == 7
    again, figures = trained(tmp_path / "cut", plan=plan(every=0), resume=True)
    assert again.calls == 5 and figures["tokens_per_pass"] >= best["tokens_per_pass"]
    for a, b in zip(whole.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(a, b)
    logs = {
        name: [json.loads(line) for line in (tmp_path / name / LOG).read_text().splitlines()]
        for name in ("whole", "cut")
    }
    assert [row["steps"] for row in logs["cut"]] == list(range(1, 13))
    last = [{**rows[-1], "minutes": 0} for rows in logs.values()]
    assert last[0] == last[1] and last[0]["tokens"] > 0
    with pytest.raises(Refused, match=r"--resume: the run in .* is complete after .* give more --minutes"):
        trained(tmp_path / "cut", resume=True)


def test_what_a_resumed_run_needs_is_kept(tmp_path: Path) -> None:
    """Without the state, a run from the same weights is another one; so the test above can fail."""
    whole, _ = trained(tmp_path / "whole")
    _interrupted(tmp_path / "cut")
    (tmp_path / "cut" / STATE).unlink()
    again, _ = trained(tmp_path / "cut", resume=True)
    assert again.calls == 12, "it begins anew"
    assert not torch.equal(whole.module[0].weight, again.module[0].weight)  # type: ignore[index]


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    learner, figures = trained(tmp_path, plan=plan(every=0, steps=30, lr=0.3))
    rows = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    reached = [row["tokens_per_pass"] for row in rows]
    assert figures["tokens_per_pass"] == max(reached) > reached[-1], "a step that spoils the drafter is among them"
    _, weights = read_learnt(tmp_path, "guess", target())
    assert not torch.equal(weights["0.weight"], learner.module.state_dict()["0.weight"])


@pytest.mark.parametrize("broken", ["damaged", "another module"])
def test_unusable_states_are_refused(broken: str, tmp_path: Path) -> None:
    _interrupted(tmp_path)
    if broken == "damaged":
        (tmp_path / STATE).write_bytes((tmp_path / STATE).read_bytes()[:-999])
    else:
        state = torch.load(tmp_path / STATE, weights_only=True)
        del state["module"]["0.bias"]
        torch.save(state, tmp_path / STATE)
    found = "training.pt' is damaged" if broken == "damaged" else "the state of the run is that of another module"
    with pytest.raises(Refused, match=found) as refused:
        trained(tmp_path, resume=True)
    assert "\n" not in str(refused.value)


def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"the loss is not a number after 5 steps; lower the learning rate \(lr=0.03\)"):
        trained(tmp_path, Guess(lambda call: call == 6), plan=plan(every=0))
    _, weights = read_learnt(tmp_path, "guess", target())
    assert all(weight.isfinite().all() for weight in weights.values())
    state = read_state(tmp_path)
    assert state is not None and state["steps"] == 5


class _HalfWritten:
    """A file on a full disk: half of what is written is there."""

    def __init__(self, file: Any):
        self.file = file

    def __enter__(self) -> _HalfWritten:
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.close()

    def write(self, data: Any) -> None:
        self.file.write(bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", self.file.name)


def _fill_disk(monkeypatch: pytest.MonkeyPatch, name: str, written: int) -> None:
    """The disk is full after a file of this name was written some times."""
    left = written
    save = safetensors.numpy.save_file

    def fits(path: Any) -> bool:
        nonlocal left
        left -= name in str(path)
        return left >= 0

    def opened(path: Path, mode: str) -> Any:
        file = path.open(mode)
        return file if fits(path) else _HalfWritten(file)

    def saved(arrays: Any, path: str, metadata: Any) -> None:
        save(arrays, path, metadata)
        if not fits(path):
            with open(path, "r+b") as file:
                file.truncate(Path(path).stat().st_size // 2)
            raise safetensors.SafetensorError("IoError: No space left on device")

    monkeypatch.setattr("truedraft.files.open", opened, raising=False)
    monkeypatch.setattr("safetensors.numpy.save_file", saved)


@pytest.mark.parametrize("name", [WEIGHTS, STATE, LOG, CURVES])
def test_full_disk_keeps_the_last_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, nothing half-written, and with room again the run goes on as if nothing had happened."""
    whole, _ = trained(tmp_path / "whole")
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        _fill_disk(patched, name, 2)
        with pytest.raises(
            Refused, match=r"No space left on device.*the last checkpoint is kept: make room"
        ) as refused:
            trained(out, plan=plan(every=0))
    assert "\n" not in str(refused.value)
    assert {path.name for path in out.iterdir()} == {WEIGHTS, STATE, LOG, CURVES, "responses"}
    read_learnt(out, "guess", target())
    state = read_state(out)
    assert state is not None
    again, _ = trained(out, plan=plan(every=0), resume=True)
    assert again.calls == 12 - state["steps"] < 12
    assert torch.equal(whole.module[0].weight, again.module[0].weight)  # type: ignore[index]
    steps = [json.loads(line)["steps"] for line in (out / LOG).read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 12


def test_full_disk_keeps_finished_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "PART", 6)
    with monkeypatch.context() as patched:
        _fill_disk(patched, "0000", 2)
        with pytest.raises(Refused, match=r"No space left on device.*goes on from the responses that were kept"):
            trained(tmp_path)
    kept = [path.name for path in (tmp_path / "responses").iterdir()]
    assert sorted(kept) == ["00000.safetensors", "00001.safetensors"]
    trained(tmp_path)


def test_other_learning_rates_are_those_of_the_resumed_plan(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    state = read_state(tmp_path)
    module = nn.Sequential(nn.Linear(32, models.V))
    run = loop._begun(module, plan(lr=0.5), ([module[0].weight], [module[0].bias]))  # type: ignore[list-item]
    assert state is not None
    run.restore(state)
    assert [group["most"] for optimizer in run.optimizers for group in optimizer.param_groups] == [0.5, 0.125]
    assert isinstance(run.optimizers[0], Muon) and run.optimizers[0].state[module[0].weight]["momentum"].any()


def test_batches_without_a_token_to_predict_change_nothing(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    before = copy.deepcopy(module.state_dict())
    empty = iter(lambda: torch.zeros(()), None)
    saved: list[Run] = []
    run = loop.fit(
        module, lambda batch: batch, empty, plan(steps=3), validate=dict, save=saved.append, log=tmp_path / "log"
    )
    assert run.steps == 3 and saved == [run]
    assert all(torch.equal(before[name], weight) for name, weight in module.state_dict().items())


@pytest.mark.parametrize("flags", [{"avx2"}, {"avx512_bf16"}, set()], ids=["none", "units", "unknown"])
def test_bf16_is_refused_without_units(flags: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "processor", lambda: frozenset(flags))
    if flags == {"avx2"}:
        with pytest.raises(Refused, match="--bf16: this machine has no units for products in bf16"):
            trained(tmp_path, plan=plan(bf16=True))
    else:
        learner, _ = trained(tmp_path, plan=plan(bf16=True, steps=2))
        assert learner.module.state_dict()["0.weight"].dtype == torch.float32


def test_targets_that_cannot_be_hosted_are_refused_before_any_work(tmp_path: Path) -> None:
    model = target().train()
    with pytest.raises(Refused, match="training mode"):
        train_drafter(Guess(), model, tokenizer(), texts(3), tmp_path / "out", plan())
    assert not (tmp_path / "out" / "responses").exists()


# ---------------------------------------------------------------- pictures


def test_picture_has_the_figures_of_the_log() -> None:
    rows = [
        {"minutes": i / 2, "steps": i, "loss": 4.0 - i, "tokens_per_pass": 1.0 + i, "acceptance": [0.5, 0.25 * i]}
        for i in range(4)
    ]
    found = ElementTree.fromstring(drawn(rows))
    paths = [e.attrib["d"] for e in found.iter("{http://www.w3.org/2000/svg}path") if "stroke-width" in e.attrib]
    heights = [
        [220 - 42 - float(point.split()[1]) for point in d.removeprefix("M").split("L")] for d in paths if "H" not in d
    ]
    full = 220 - 42 - 14
    expected = [[1, 2, 3, 4], [0.5] * 4, [0, 0.25, 0.5, 0.75], [4, 3, 2, 1]]
    for line, values, top in zip(heights, expected, (4, 1, 1, 4), strict=True):
        assert line == pytest.approx([full * value / top for value in values], abs=0.1)
    words = {e.text for e in found.iter("{http://www.w3.org/2000/svg}text")}
    assert words >= {"tokens per pass", "acceptance by position", "loss", "position 2", "1.5", "100%", "held out"}
    alone = drawn([{"minutes": 0.0, "steps": 0, "loss": 0.0, "tokens_per_pass": 1.0}])
    assert "acceptance" not in alone and ElementTree.fromstring(alone) is not None


def test_names_in_pictures_are_escaped() -> None:
    found = picture([Panel("a < b", [("x & y", [1.0, 2.0])])], "n")
    assert {e.text for e in ElementTree.fromstring(found).iter("{http://www.w3.org/2000/svg}text")} >= {
        "a < b",
        "x & y",
    }


# ---------------------------------------------------------------- command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("target")
    target().save_pretrained(found)
    tokenizer().save_pretrained(found)
    return found


def test_command_trains_a_drafter_of_a_decoder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    entries = [{"prompt": text.replace(" ", "\n")} for text in texts(20)]
    data.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    base = ["train", "eagle3", "--target", str(folder), "--data", str(data), "--out", str(out), "--device", "cpu"]
    options = ["--max-new-tokens", "9", "--temperature", "0.7", "--chat", "--seed", "3", "--batch", "256"]
    assert main([*base, *options, "--minutes", "0.01", "--every", "0.002"]) == 0
    assert f"use it as --draft eagle3:{out}" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {WEIGHTS, STATE, LOG, CURVES, "responses"}
    steps = [json.loads(line)["steps"] for line in (out / LOG).read_text().splitlines()]
    assert main([*base, *options, "--minutes", "0.02", "--resume"]) == 0
    later = [json.loads(line)["steps"] for line in (out / LOG).read_text().splitlines()]
    assert later[: len(steps)] == steps and later[-1] > steps[-1]
    for changes, message in (
        (["--minutes", "0.02", "--resume"], "is complete after"),
        (["--minutes", "9", "--resume", "--seed", "4"], "holds responses by other settings"),
        (["--minutes", "9"], "go on from it with --resume"),
    ):
        given = options if "--seed" not in changes else options[:-4]
        assert main([*base, *given, *changes]) == 2
        error = capsys.readouterr().err.splitlines()
        assert len(error) == 1 and message in error[0], error


@pytest.mark.parametrize(("name", "out"), [("eagle2", "plain"), ("eagle2", "with=sign"), ("eagle2-published", "plain")])
def test_command_prints_a_draft_that_can_be_used(
    name: str, out: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the drafter that was given, whose heads another drafter may share."""
    data = tmp_path / "lines.txt"
    data.write_text("\n".join(texts(20)))
    base = ["train", name, "--target", str(folder), "--data", str(data), "--minutes", "0.01", "--labels", "given"]
    assert main([*base, "--out", str(tmp_path / out)]) == 0
    spec = capsys.readouterr().out.strip().rpartition(" ")[2]
    assert spec.startswith(f"{name}:")
    for draft in (spec, spec.replace(name, "eagle", 1)):
        truedraft.accelerate(target(), draft=draft).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)


def test_command_trains_on_given_texts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines with a tab are prompt and response, others texts of their own."""
    data, out = tmp_path / "lines.txt", tmp_path / "out"
    data.write_text("\n".join([*texts(20), "w9 w10\tw11 w12"]))
    base = ["train", "eagle3:steps=2", "--target", str(folder), "--data", str(data), "--minutes", "0.01"]
    assert main([*base, "--out", str(out), "--labels", "given"]) == 0
    assert not (out / "responses").exists() and (out / WEIGHTS).exists()
    capsys.readouterr()


@pytest.mark.parametrize("spec", ["hydra:prefix=True,vocabulary=20", "mlp-speculator:tied=True"])
def test_trained_folder_drafts_by_its_path(
    spec: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "lines.txt", tmp_path / "out"
    data.write_text("\n".join(texts(20)))
    base = ["train", spec, "--target", str(folder), "--data", str(data), "--minutes", "0.01", "--labels", "given"]
    assert main([*base, "--out", str(out)]) == 0
    assert f"use it as --draft {spec.partition(':')[0]}:{out}" in capsys.readouterr().out
    figures = json.loads((out / LOG).read_text().splitlines()[-1])
    assert figures["tokens_per_pass"] >= 1 and len(figures["acceptance"]) <= 4
    model, ids = target(), torch.tensor([[5, 6, 7, 5, 6]])
    fast = truedraft.accelerate(model, draft=f"{spec.partition(':')[0]}:{out}")
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=12, do_sample=False), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device tpu: choose one of auto, cpu, cuda"),
        (["--temperature", "-1"], "--temperature -1.0: give 0, or a number"),
        (["--temperature", "nan"], "--temperature nan: give 0, or a number"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: give a number above 0"),
        (["--max-length", "1"], "--max-length 1: give 0 for the model's context, or at least 2"),
        (["--minutes", "inf"], "--minutes inf: give a number above 0"),
        (["--every", "nan"], "--every nan: give a number above 0"),
    ],
)
def test_command_refuses_settings(
    options: Sequence[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "lines.txt"
    data.write_text("w9 w10\n")
    base = ["train", "eagle3", "--target", str(folder), "--data", str(data), "--out", str(tmp_path / "out")]
    assert main([*base, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_command_refuses_a_missing_gpu(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "lines.txt"
    data.write_text("w9 w10\n")
    base = ["train", "eagle3", "--target", str(folder), "--data", str(data), "--out", str(tmp_path / "out")]
    assert main([*base, "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["no json", '["prompt"]', "3", '{"text": "w9"}', '{"prompt": " "}', '{"prompt": "a", "response": 3}']
)  # fmt: skip
def test_lines_of_json_without_a_prompt_are_refused(
    line: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "lines.jsonl"
    data.write_text(f'{{"prompt": "w9"}}\n\n{line}\n')
    base = ["train", "eagle3", "--target", str(folder), "--data", str(data), "--out", str(tmp_path / "out")]
    assert main(base) == 2
    assert 'line 3 is not {"prompt": TEXT} with an optional "response": TEXT' in capsys.readouterr().err
