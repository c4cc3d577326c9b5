"""Training for policies of diffusion models: what is noised, the loss by hand, runs continued."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import truedraft
from test_canvas import MASK, model_of, plain
from truedraft.canvas.layout import Layout
from truedraft.cli import main
from truedraft.errors import Refused
from truedraft.train.canvases import TRAININGS, train_policy
from truedraft.train.certainty import CertaintyForcing, logits_of, stacked
from truedraft.train.loop import Plan

LAYOUTS = [Layout(MASK, "blocks", 4), Layout(MASK, "blocks", 4, True), Layout(MASK, "whole", 5)]
IDS = ["blocks", "shifted", "whole"]


class Numbers:
    """A tokenizer of numbers."""

    def __call__(self, text: str) -> Any:
        return type("Encoding", (), {"input_ids": [int(word) for word in text.split()]})

    def save_pretrained(self, folder: Path) -> None:
        (folder / "numbers").write_text("")


def target(layout: Layout, seed: int = 0) -> Any:
    model = model_of(seed)
    model.config.canvas_config = {
        "mask": layout.mask, "attention": layout.attention, "block": layout.block, "shifted": layout.shifted,
    }  # fmt: skip
    model.generation_config.suppress_tokens = [MASK]
    return model


PROMPTS = [" ".join(str(random.Random(i).randrange(6, 98)) for _ in range(3 + i % 5)) for i in range(12)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_both_halves_of_a_block_are_masked_and_what_is_behind_it(layout: Layout) -> None:
    rng, ids, prompt = random.Random(0), list(range(10, 27)), 6
    seen = Counter[int]()
    for _ in range(60):
        one, other = CertaintyForcing().noised(prompt, ids, layout, rng)
        (shown, masked), (again, rest) = one, other
        positions = sorted([*masked, *rest])
        block = next(block for block in layout.blocks(prompt, 11) if positions[0][0] in block)
        assert positions == [(i, ids[i]) for i in block if prompt <= i < len(ids)]
        length = len(ids) if layout.attention == "whole" else block.stop
        for text, hidden in ((shown, dict(masked)), (again, dict(rest))):
            assert text == [MASK if i in hidden or i >= block.stop or i >= len(ids) else ids[i] for i in range(length)]
        seen[block.start] += 1
    assert len(seen) == len(layout.blocks(prompt, 11)) and min(seen.values()) > 5


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_the_loss_is_that_of_plain_forwards(layout: Layout) -> None:
    model, training = target(layout), CertaintyForcing(weight=3.0, temperature=0.7)
    rng = random.Random(1)
    texts = [(prompt, [rng.randrange(6, 98) for _ in range(size)]) for prompt, size in ((3, 9), (6, 19), (8, 14))]
    noised = [one for prompt, ids in texts for one in training.noised(prompt, ids, layout, rng)]
    for ids, masked in noised:  # some labels are what the model predicts
        logits = plain(model, ids, layout)
        for n, (place, _) in enumerate(masked[:2]):
            masked[n] = (place, int(logits[place - layout.shifted].argmax()))
    losses, nats = [], []
    for ids, masked in noised:
        logits = plain(model, ids, layout)
        for place, label in masked:
            row = logits[place - layout.shifted].double()
            losses.append(-float(row.log_softmax(0)[label]))
            if int(row.argmax()) == label:
                law = (row / 0.7).softmax(0).tolist()
                nats.append(-sum(p * math.log(p) for p in law if p))
    batch = stacked(noised, MASK)
    assert 2 < len(nats) < len(losses)
    with torch.no_grad():
        found = float(training.loss(model, layout, batch))
        assert logits_of(model, layout, batch).shape == (len(losses), 99)
    assert found == pytest.approx(sum(losses) / len(losses) + 3 * sum(nats) / len(nats), rel=1e-3)


def test_a_run_that_is_continued_is_that_without_a_break(tmp_path: Path) -> None:
    model, plan = target(LAYOUTS[0]), Plan(minutes=1e6, steps=20, lr=3e-3, every=0)
    before = [weight.clone() for weight in model.parameters()]

    def run(out: Path, resume: bool = False, until: int = 20) -> None:
        def report(line: str) -> None:
            if f"steps {until}," in line and until < 20:
                raise KeyboardInterrupt

        training = CertaintyForcing(texts=4)
        train_policy(training, model, Numbers(), PROMPTS, out, plan, new=16, resume=resume, report=report)

    run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", until=10)
    with pytest.raises(Refused, match="has no run to continue"):
        run(tmp_path / "none", resume=True)
    run(tmp_path / "broken", resume=True)
    once, twice = (type(model).from_pretrained(tmp_path / name).eval() for name in ("whole", "broken"))
    assert all(torch.equal(a, b) for a, b in zip(once.parameters(), twice.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)), "a copy is trained"


def test_a_model_learns_to_be_certain_of_its_own_texts(tmp_path: Path) -> None:
    model, plan = target(LAYOUTS[0]), Plan(minutes=1e6, steps=150, lr=0.01, warmup=5, every=1e6)
    train_policy(CertaintyForcing(texts=4), model, Numbers(), PROMPTS, tmp_path, plan, new=16)
    trained = type(model).from_pretrained(tmp_path).eval()

    def steps(which: Any) -> float:
        fast: Any = truedraft.accelerate(which, rule="lossy/dparallel")
        tokens = passes = 0
        for prompt in PROMPTS:
            ids = torch.tensor([Numbers()(prompt).input_ids])
            fast.generate(ids, max_new_tokens=16, eos_token_id=None, suppress_tokens=[MASK])
            tokens, passes = tokens + fast.report().tokens, passes + len(fast.report().passes)
        return passes / tokens

    assert steps(trained) < 0.75 * steps(model)


def test_a_filter_is_trained_in_a_folder_and_continued(tmp_path: Path) -> None:
    model = target(LAYOUTS[0])
    training, lines = TRAININGS["learn2pd"](hidden=16, batch=32), list[str]()
    for steps in (20, 30):
        plan = Plan(minutes=1e6, steps=steps, lr=0.02)
        used = train_policy(
            training, model, Numbers(), PROMPTS, tmp_path, plan, new=12, resume=steps == 30, report=lines.append
        )
    assert [line.split(",")[1] for line in lines if "held_out" in line] == [" steps 20", " steps 30"]
    fast: Any = truedraft.accelerate(model, rule=used.split()[-1])
    assert fast.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=12).shape[1] <= 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dparallel", "--target", "nano"], "this is none"),
        (["fast-dllm", "--target", "nano-diffusion"], "fast-dllm has nothing to learn: train one of"),
        (["dparallel:weigth=2", "--target", "nano-diffusion"], "did you mean 'weight'"),
        (["learn2pd:hidden=0", "--target", "nano-diffusion"], "hidden=0"),
    ],
)
def test_what_cannot_be_trained(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.txt").write_text("one day\n")
    assert main(["train", *arguments, "--data", str(tmp_path / "data.txt"), "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def test_prompts_that_fill_the_context_are_left_out(tmp_path: Path) -> None:
    long = " ".join(["7"] * 250)
    with pytest.raises(Refused, match="no prompt leaves room"):
        train_policy(CertaintyForcing(), target(LAYOUTS[0]), Numbers(), [long], tmp_path, Plan(steps=1))
