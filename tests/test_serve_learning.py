"""Training of a server's drafter beside it: what can be trained, when it is, and what takes a drafter's place."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

import truedraft
from served import generated, paused, running, until
from test_recording import posted
from truedraft import Refused, assets
from truedraft.cli import main
from truedraft.loading import load
from truedraft.serve import learning
from truedraft.serve.config import ServeConfig
from truedraft.serve.learning import WORK, Learning, replaced, trained_part

NANO = str(assets.path("nano"))
DRAFT = "draft-model:nano-draft"


@pytest.mark.parametrize(
    ("spec", "training", "command", "other"),
    [
        ("draft-model:nano-draft", "draft-model", "draft-model:model=nano-draft,loss_name=tvd", "draft-model:model=X"),
        ("opt-tree:model=A,nodes=9", "draft-model", "draft-model:model=A,loss_name=tvd", "opt-tree:model=X,nodes=9"),
        ("input-guided+eagle3", "eagle3", "eagle3:loss_name=tvd", "eagle3:model=X"),
        ("eagle3-published:nodes=9|suffix", "eagle3", "eagle3:loss_name=tvd", "eagle3-published:nodes=9,model=X"),
    ],
)  # fmt: skip
def test_the_part_that_learns_is_found(spec: str, training: str, command: str, other: str) -> None:
    part = trained_part(spec, NANO)
    assert (part.training, part.command("loss_name=tvd", part.start)) == (training, command)
    assert part.with_checkpoint(Path("X")) == other
    assert replaced(spec, part.spec, "Y") == spec.replace(part.spec, "Y")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("auto", "it has nothing to learn"),
        ("suffix+input-guided", "it has nothing to learn"),
        ("opt-tree:source=eagle3", "it has nothing to learn"),
        ("eagle3+medusa", "2 of its parts learn: name one"),
        ("draft-model", "names no checkpoint to begin with"),
        ("hydra", "names no checkpoint to begin with"),
        ("eagle:nowhere", "'nowhere' is no checkpoint of `truedraft train eagle`"),
    ],
)
def test_drafters_that_cannot_be_trained_on_are_refused(spec: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        trained_part(spec, NANO)


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = dict(model="nano", train=tmp_path / "runs", record=tmp_path / "live.jsonl")
    for changes, message in (
        ({"record": None}, "give record= a file as well"),
        ({"ray": True}, "replicas would train each for itself"),
        ({"quantize": "int8"}, "needs the model's own weights"),
        ({"view": "lossy/layers"}, "trains for the model"),
        ({"train_weights": "reward"}, "choose one of none, accepted"),
    ):
        with pytest.raises(Refused, match=message):
            ServeConfig(**{**given, **changes})


class Outcome:
    """What a training in a process leaves: a log, and a draft model, here `nano-draft` again, or nothing."""

    def __init__(self) -> None:
        self.rates: list[float] | None = [1.5, 1.4, 1.6]
        self.lines: list[list[dict[str, Any]]] = []
        self.starts: list[str] = []

    def ran(self, learner: Learning, work: Path) -> bool:
        self.lines.append([json.loads(line) for line in (work / "lines.jsonl").read_text().splitlines()])
        self.starts.append(learner.current)
        shutil.copytree(assets.path("nano-draft"), work / "out")
        rows = [{"minutes": i, "tokens_per_pass": rate} for i, rate in enumerate(self.rates or [2.0])]
        (work / "out" / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return self.rates is not None


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    made = Outcome()
    monkeypatch.setattr(Learning, "_ran", lambda learner, work: made.ran(learner, work))
    monkeypatch.setattr(learning, "POLL", 0.02)
    return made


def settings(tmp_path: Path, **given: Any) -> dict[str, Any]:
    return dict(draft=DRAFT, record=tmp_path / "live.jsonl", train=tmp_path / "runs", train_every=10, **given)


def fast(draft: str = DRAFT) -> Any:
    return truedraft.accelerate(*load("nano"), draft=draft, control="fixed")


def ask(url: str, count: int) -> None:
    for i in range(count):
        posted(url, model="nano", prompt=f"One day, {'a dog ' * i}", max_tokens=3, temperature=0)


def test_a_better_one_takes_the_place_of_the_drafter_and_a_worse_one_never(tmp_path: Path, outcome: Outcome) -> None:
    """It is trained on what its start has not been trained on: recorded since the last better one. Texts are those of
    plain decoding, also that of a row that runs meanwhile, which keeps its drafter."""
    model = fast()
    first, runs = model.drafter, tmp_path / "runs"
    with running(model, **settings(tmp_path)) as server:
        served = server.server.model
        composed = served.drafter(None, True, False)  # for a request with references
        ask(server.url, 9)
        outcome.rates = [1.5, 1.4, 1.5]
        ask(server.url, 1)
        until(lambda: len(outcome.lines) == 1)
        until(lambda: not (runs / WORK).exists())
        assert model.drafter is first and not any(path.name.isdigit() for path in runs.iterdir())
        outcome.rates = None  # it fails
        ask(server.url, 10)
        until(lambda: len(outcome.lines) == 2 and not (runs / WORK).exists())
        assert model.drafter is first
        outcome.rates = [1.5, 1.6, 1.4]
        ask(server.url, 9)
        with paused(server):
            answers: list[Any] = []
            body: dict[str, Any] = dict(
                model="nano", prompt="Once upon a time", max_tokens=900, temperature=0, ignore_eos=True
            )
            asking = threading.Thread(target=lambda: answers.append(posted(server.url, **body)))
            asking.start()
            until(lambda: server.server.loop._new)
        learner, install = server.server.learning, Learning.install
        assert learner is not None

        def installed(folder: Path) -> None:
            install(learner, folder)
            drafters.extend(job.settings["draft"] for job in server.server.loop.running.values())

        drafters: list[Any] = []
        learner.install = installed  # type: ignore[method-assign]
        ask(server.url, 1)
        until(lambda: model.drafter is not first)
        asking.join()
        assert drafters == [first], "the request has ended before the drafter was replaced"
        plain = posted(server.url, **body, draft="none")["choices"][0]["text"]
        assert answers[0]["choices"][0]["text"] == plain
        assert [len(lines) for lines in outcome.lines] == [10, 20, 30], "what it was trained on and found no better"
        ask(server.url, 10)
        until(lambda: len(outcome.lines) == 4 and (runs / "0002").is_dir() and not (runs / "0001").exists())
        assert 10 <= len(outcome.lines[3]) <= 11, "only what was recorded since"
        assert outcome.starts == ["nano-draft"] * 3 + [str(runs / "0001")]
        assert served.drafter(None, False, False) is model.drafter and composed not in served._composed.values()
        for made in (model.drafter, served.drafter(None, True, False).parts[-1]):  # type: ignore[attr-defined]
            assert made.model.config.name_or_path == str(runs / "0002")
        late = posted(server.url, **{**body, "max_tokens": 60})["choices"][0]["text"]
    (expected,) = generated(model, "Once upon a time", max_new_tokens=60, do_sample=False)
    assert late == model.tokenizer.decode(expected, skip_special_tokens=True) and plain.startswith(late)
    again = fast()
    with running(again, **settings(tmp_path)) as server:
        assert server.server.learning is not None and server.server.learning.current == str(runs / "0002")
        assert again.drafter.model.config.name_or_path == str(runs / "0002"), "a server begins with the newest"


def test_outputs_that_are_kept_go_over(tmp_path: Path, outcome: Outcome) -> None:
    draft = f"suffix+{DRAFT}"
    model = fast(draft)
    with running(model, **{**settings(tmp_path), "draft": draft}) as server:
        ask(server.url, 10)
        until(lambda: (tmp_path / "runs" / "0001").is_dir() and not (tmp_path / "runs" / WORK).exists())
        held = [len(memory) for memory in model.drafter.memories()]
        assert held and all(count >= 30 for count in held)


def test_a_folder_is_for_one_server_and_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    model = fast()
    with running(model, **settings(tmp_path)), pytest.raises(Refused, match="another server trains there"):
        running(model, **settings(tmp_path)).__enter__()
    for changes, message in (
        ({"train_knobs": "layers=3"}, "model= is continued in its own shape"),
        ({"train_knobs": "depth=3"}, "the training of draft-model has no knob"),
        ({"train": tmp_path / "a,b"}, "name a folder without any of"),
        ({"draft": "auto"}, "it has nothing to learn"),
    ):
        with pytest.raises(Refused, match=message):
            running(model, **{**settings(tmp_path), **changes}).__enter__()


def test_its_command_is_one_of_truedraft_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training itself, in this process: the weights change, and the log begins with those before."""
    monkeypatch.setattr(learning, "POLL", 0.02)
    rows: list[dict[str, Any]] = []

    def started(command: list[str], **_: Any) -> Any:
        assert main(command[3:]) == 0
        out = Path(command[command.index("--out") + 1])
        rows.extend(json.loads(line) for line in (out / "log.jsonl").read_text().splitlines())
        return SimpleNamespace(pid=-1, poll=lambda: 0, returncode=0)

    monkeypatch.setattr(learning.subprocess, "Popen", started)
    given = settings(tmp_path, train_minutes=0.01, train_weights="accepted", train_knobs="loss_name=ce,drafted=3")
    with running(fast(), **given) as server:
        ask(server.url, 10)
        until(lambda: rows and not (tmp_path / "runs" / WORK).exists())
    assert rows[0]["minutes"] == 0 and "loss" not in rows[0] and rows[-1]["steps"] > 0
    taken = max(row["tokens_per_pass"] for row in rows[1:]) > rows[0]["tokens_per_pass"]
    assert (tmp_path / "runs" / "0001").is_dir() == taken


def test_a_training_ends_with_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended, and leaves nothing."""
    monkeypatch.setattr(learning, "POLL", 0.02)
    real, made = learning.subprocess.Popen, []

    def started(command: list[str], **options: Any) -> Any:
        made.append(real([command[0], "-c", "import time; time.sleep(60)"], **options))
        return made[0]

    monkeypatch.setattr(learning.subprocess, "Popen", started)
    with running(fast(), **settings(tmp_path)) as server:
        ask(server.url, 10)
        until(lambda: made)
    assert made[0].poll() is not None and not (tmp_path / "runs" / WORK).exists()


def test_what_a_failed_training_leaves_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that fails after a validation that was better."""
    monkeypatch.setattr(learning, "POLL", 0.02)
    made: list[Path] = []

    def started(command: list[str], **_: Any) -> Any:
        made.append(out := Path(command[command.index("--out") + 1]))
        shutil.copytree(assets.path("nano-draft"), out)
        (out / "log.jsonl").write_text('{"tokens_per_pass": 1.5}\n{"tokens_per_pass": 1.6}\n')
        return SimpleNamespace(pid=-1, poll=lambda: 1, returncode=1)

    monkeypatch.setattr(learning.subprocess, "Popen", started)
    model = fast()
    first = model.drafter
    with running(model, **settings(tmp_path)) as server:
        ask(server.url, 10)
        until(lambda: made and not made[0].exists())
    assert model.drafter is first and not (tmp_path / "runs" / "0001").exists()
