"""The audits find no errors in correct engines, and detect every planted fault."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import faults
import truedraft
from faults import Fault, unchecked
from models import sibling, tiny
from truedraft import registry
from truedraft.accept import _rounds, _verification
from truedraft.audit import laws, tokens
from truedraft.audit.precise import Precise
from truedraft.audit.tokens import MODES, Audit, audit
from truedraft.cli import _progress, main
from truedraft.drafters._growing import GrowingDrafter
from truedraft.runtime.padded import Padded
from truedraft.tree import DraftTree

PROMPTS = ["3 1 4 3 1 4 3", "9 2 6 5 9 2 6 5 9", "8 9 7", "5 5 8 2 5 5 8"]


EOS = 22


class Digits:
    """A tokenizer of numbers."""

    pad_token_id = 0

    def __call__(self, text: str | list[str], **_: Any) -> dict[str, Tensor]:
        lines = [[int(t) for t in line.split()] for line in ([text] if isinstance(text, str) else text)]
        longest = max(map(len, lines))
        return {
            "input_ids": torch.tensor([[0] * (longest - len(line)) + line for line in lines]),
            "attention_mask": torch.tensor([[0] * (longest - len(line)) + [1] * len(line) for line in lines]),
        }

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def audited(dtype: torch.dtype = torch.float32, runtime: str = "stock", batches: Sequence[int] = (1, 4)) -> Audit:
    model = tiny("llama", dtype)
    model.generation_config.eos_token_id = EOS
    sides = {
        name: truedraft.accelerate(model, draft=draft, control="fixed", runtime=runtime)
        for name, draft in (
            ("plain", None),
            ("prompt-lookup", "prompt-lookup"),
            ("gumbel-top-k", registry.load("drafters", "gumbel-top-k", model=sibling(model))),
        )
    }
    try:
        return audit(model, Digits(), sides, PROMPTS, "tiny", 24, batches, MODES)
    finally:
        model.generation_config.eos_token_id = None


@pytest.mark.parametrize("runtime", ["stock", "auto"])
def test_no_divergence_without_a_fault(runtime: str) -> None:
    found = audited(runtime=runtime)
    assert found.exact and not [d for d in found.found if d.kind != "tie"]
    assert found.tokens > 300 and found.rows == found.tokens and found.precise == "float64"
    assert 0 < found.noise < 1e-3 and 0 < found.worst_row < tokens.FAR


def test_low_precision_gives_ties_and_no_bugs() -> None:
    found = audited(torch.bfloat16, batches=(4,))
    assert found.exact and found.noise > 1e-3


def test_a_model_in_the_highest_precision_is_its_own_reference() -> None:
    assert Precise(tiny()).model is tiny() and Precise(tiny()).dtype == "float64"


def shifted(nodes: Padded) -> Padded:
    """Positions off by one, where rows differ in length."""
    nodes.positions = nodes.positions + (nodes.positions[:, :1] != nodes.positions[:, :1].amax())
    return nodes


def plant_shift(patch: pytest.MonkeyPatch) -> None:
    true = Padded.of.__func__  # type: ignore[attr-defined]
    patch.setattr(Padded, "of", classmethod(lambda cls, *args: shifted(true(cls, *args))))


TOKEN_FAULTS: dict[str, Fault] = {
    "KV of the first nodes instead of the path's": faults.FIRST_NODES_KEPT,
    "KV of a rejected node kept": faults.REJECTED_KEPT,
    "drafts accepted unseen": faults.ACCEPTED_UNVERIFIED,
    "end of text leaks past an accepted run": faults.EOS_IGNORED,
    "noise per draw, not per step": faults.noise_per_draw,
    "position off by one in a ragged batch": plant_shift,
    "stale penalty history within a pass": faults.STALE_HISTORY,
}


@pytest.mark.parametrize("fault", TOKEN_FAULTS)
def test_the_token_audit_reports_a_planted_fault_as_a_bug(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(TOKEN_FAULTS[fault])(monkeypatch)
    found = audited(batches=(4,))
    assert not found.exact, f"{fault}: nothing was found"


TEXTS = 90  # of planted faults, whose p-values have to be far below the alarm, 5e-4


def law_of(draft: str = "gumbel-top-k", rule: str = "multi-round", **knobs: Any) -> laws.Law:
    model = tiny("llama", torch.float32, 2.0)
    part = registry.load("drafters", draft, model=sibling(model, 0.3), **knobs)
    found = laws.law_audit(model, Digits(), {draft: part}, PROMPTS, rules=[rule], texts=TEXTS, tokens=8)
    return min(found, key=lambda law: law.p_value)


def test_correct_rules_pass_the_law_audit() -> None:
    assert law_of().holds and law_of("draft-model", "block", length=3).holds


def test_rows_that_end_early_are_tested_up_to_their_end() -> None:
    model = tiny("llama", torch.float32, 2.0)
    model.generation_config.eos_token_id = EOS
    try:
        law = law_of("draft-model", "rejection", length=3)
    finally:
        model.generation_config.eos_token_id = None
    assert law.holds and law.tokens < 2 * TEXTS * 8


def plant_wrong_q(patch: pytest.MonkeyPatch) -> None:
    """The draft distribution of another node instead of that which was drawn from."""
    true = _verification.candidates

    def wrong(tree: DraftTree, node: int, *hidden: Any) -> Any:
        offered = true(tree, node, *hidden)
        return replace(offered, dist=None if offered.dist is None else offered.dist.roll(1))

    patch.setattr(_verification, "candidates", wrong)


def plant_no_residual(patch: pytest.MonkeyPatch) -> None:
    """After a rejection the token is drawn from the target distribution instead of the residual."""
    patch.setattr(_rounds, "as_law", lambda weights, otherwise: otherwise)


def plant_bonus_from_the_draft(patch: pytest.MonkeyPatch) -> None:
    """Where all is accepted, the bonus token is drawn from the draft distribution."""

    def tokens_by(scores: Tensor, candidates: Any, rows: Any, chance: Any, verify: Any) -> list[int]:
        flat = [o.dist.log() if o.dist is not None else s for s, o in zip(scores, candidates, strict=True)]
        return chance.pick(torch.stack(flat).softmax(-1), rows)  # type: ignore[no-any-return]

    patch.setattr("truedraft.accept.multi_round.tokens_by", tokens_by)


def plant_pruning(patch: pytest.MonkeyPatch) -> None:
    """Siblings are pruned by their tokens, after they were drawn."""
    true = GrowingDrafter.finished

    def finished(self: GrowingDrafter, growing: Any) -> DraftTree:
        tree = true(self, growing)
        laws: Any = tree.dist
        unsure = {
            i for i in range(1, len(tree)) if 2 * laws[tree.parent[i]][tree.tokens[i]] < laws[tree.parent[i]].max()
        }
        kept = [i for i in range(1, len(tree)) if i not in unsure]
        kept = [i for i in kept if all(a in (0, *kept) for a in tree.path(i))]
        return growing.tree(self.draws, [i + growing.root for i in kept])  # type: ignore[no-any-return]

    patch.setattr(GrowingDrafter, "finished", finished)


LAW_FAULTS: dict[str, Fault] = {
    "q of the wrong node": plant_wrong_q,
    "no residual after a rejection": plant_no_residual,
    "bonus token drawn from the draft": plant_bonus_from_the_draft,
    "sibling pruned after it was drawn": plant_pruning,
}


@pytest.mark.parametrize("fault", LAW_FAULTS)
def test_the_law_audit_detects_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LAW_FAULTS[fault](monkeypatch)
    law = law_of()
    assert not law.holds, f"{fault}: p-value {law.p_value:.2g}, a bias of {law.bias:.2%} would have been caught"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--max-new-tokens", "12", "--prompt", "Once upon a time", "--prompt", "def f(x):", "--batch", "2"]
    assert main(["audit", "nano", "--draft", "prompt-lookup", *settings, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["divergences"] == {"tie": 0, "numerics": 0, "bug": 0}
    assert found["tokens"] > 0 and found["exact"] and found["drafters"] == ["plain", "prompt-lookup"]
    assert main(["audit", "nano", "--draft", "prompt-lookup", *settings]) == 0
    assert "exact" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--batch", "0"], "--batch"), (["--prompt", ""], "empty"), (["--draft", "nonsense"], "nonsense")],
)
def test_the_command_refuses(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "nano", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_fault_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    faults.ACCEPTED_UNVERIFIED(monkeypatch)
    prompt = ["--prompt", "Tom ran and ran and ran and ran and", "--draft", "prompt-lookup", "--max-new-tokens", "24"]
    assert main(["audit", "nano", *prompt]) == 1
    assert "NOT exact" in capsys.readouterr().out


FEW = ["--max-new-tokens", "3", "--prompt", "one day", "--prompt", "tom ran", "--batch", "2"]


@pytest.mark.parametrize(("model", "ways"), [("nano", 2), ("nano-gec", 2), ("nano-diffusion", 2)])
def test_by_default_the_default_drafter_is_audited(model: str, ways: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", model, *FEW, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["drafters"] == ["plain", "auto"] and found["exact"] and not found["left_out"]
    assert [one["drafter"] for one in found["compared"]] == ["plain", "auto"]
    texts = 2 * len(found["modes"])
    assert [one["texts"] for one in found["compared"]] == [texts] * ways and found["texts"] == ways * texts
    assert sum(one["tokens"] for one in found["compared"]) == found["tokens"] > 0


def test_all_takes_every_drafter_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that need nothing, those with an embedded draft model, and the embedded heads."""
    assert main(["audit", "nano", "--all", "--max-new-tokens", "2", "--prompt", "tom", "--batch", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    taken = {name.partition(":")[0] for name in found["drafters"]}
    needs = {name: registry.method("drafters", name).card.needs for name in registry.names("drafters")}
    assert taken >= {name for name, what in needs.items() if what in ((), ("draft model",), ("diffusion model",))}
    assert taken >= {"plain", "auto", "eagle3", "medusa"} and not found["left_out"]
    assert {one["drafter"] for one in found["compared"]} == {*found["drafters"]}
    assert main(["audit", "nano", "--all", "--draft", "suffix"]) == 2
    assert "--all takes every drafter, and --draft suffix names one" in capsys.readouterr().err


def test_drafters_that_refuse_a_model_are_left_out_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where they were not named; a drafter that was named ends the command."""
    chosen = ["auto", "draft-model:model=nano-gec", "suffix"]
    monkeypatch.setattr("truedraft.cli.audit._all", lambda *_: chosen)
    assert main(["audit", "nano", "--all", *FEW, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["drafters"] == ["plain", "auto", "suffix"] and list(found["left_out"]) == [chosen[1]]
    assert main(["audit", "nano", "--all", *FEW]) == 0
    assert f"left out     {chosen[1]}: " in capsys.readouterr().out
    assert main(["audit", "nano", "--draft", chosen[1], *FEW]) == 2
    assert found["left_out"][chosen[1]] in capsys.readouterr().err


def test_progress_counts_every_run_once() -> None:
    model, told = tiny("llama", torch.float32), list[tuple[str, float]]()
    sides = {name: truedraft.accelerate(model, draft=name, control="fixed") for name in ("none", "llma", "suffix")}
    audit(model, Digits(), sides, PROMPTS, "tiny", 3, (1, 4), MODES, lambda *now: told.append(now))
    assert [text.rpartition(": ")[2] for text, _ in told[:4]] == ["the model alone", *sides]
    assert told[0][0].startswith("greedy, prompt 1:") and told[16][0].startswith("greedy, prompts 1 to 4:")
    shares = [share for _, share in told]
    assert len(shares) == 3 * 5 * 4 and shares == pytest.approx([i / 60 for i in range(60)])


def test_a_bar_has_the_time_left_and_lines_do_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])

    def run() -> str:
        with _progress.progressing("loading") as show:
            for second, share in ((1, 0.0), (10, 0.25), (20, 0.5), (40, 0.75), (45, 0.9), (60, 1.0)):
                now[0] = 100.0 + second
                show(f"step {second}", share)
        now[0] = 100.0
        return "".join(char for char in capsys.readouterr().err if char.isprintable() or char == "\n")

    lines = run().splitlines()
    assert lines == ["50% done, 0:20 left: step 20", "75% done, 0:13 left: step 40", "100% done, 0:00 left: step 60"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    assert "100%" in (shown := run()) and "0:00 left" in shown and "step 60" in shown
    assert [_progress.clock(s) for s in (0, 59.6, 3725)] == ["0:00", "1:00", "1:02:05"]


def test_a_terminal_sees_the_bar_and_only_results_are_piped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["audit", "nano", "--draft", "llma", *FEW, "--json"]) == 0
    emitted = capsys.readouterr()
    assert json.loads(emitted.out)["exact"] and "%" in emitted.err and " left" in emitted.err


def test_the_page_lists_every_fault() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "audit.md").read_text()
    assert all(f"| {fault} |" in page for fault in (*TOKEN_FAULTS, *LAW_FAULTS))
