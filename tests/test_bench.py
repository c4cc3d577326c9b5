"""Benchmarks: equality before speed, figures that add up, floors computed by hand, files of all formats."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom

import truedraft
from models import tiny
from truedraft import Refused
from truedraft.bench import columns, page
from truedraft.bench import compare as comparing
from truedraft.bench.compare import Figures, compare, interval
from truedraft.bench.equality import equalities
from truedraft.bench.oracle import Oracle, theory
from truedraft.bench.roofline import Gauge, Machine, RooflinePoint, measure_passes, roofline
from truedraft.bench.sides import Clock, Side, transformers_side, truedraft_side
from truedraft.bench.workloads import Item, Workload, embedded, from_file
from truedraft.canvas._base import CanvasRow, Draft, Policy
from truedraft.canvas.speculators.freedave import Freedave
from truedraft.cli import main
from truedraft.cli._models import load
from truedraft.runtime import native
from truedraft.runtime.native import Form
from truedraft.targets.decoder import DecoderTarget

STORY = Workload("story", (Item("one day, a little girl"), Item("tom and his mom")), 12)


def test_floor_of_a_pass_equals_a_hand_count() -> None:
    target = DecoderTarget(tiny("llama", torch.float32))
    h, inner, heads, head, vocabulary, layers = 32, 48, 4, 8, 61, 2
    block = h * heads * head * 2 + h * 2 * head * 2 + 3 * h * inner + 2 * h
    weights = layers * block + h + vocabulary * h  # the table of embeddings is looked up, not read through
    keys_and_values = 2 * layers * 10 * 2 * head
    reading = (weights + keys_and_values) * 4 / 1e9
    rows = roofline(target, Machine(1e9, 1e9), {1: 2 * reading, 4: 1.0}, context=10)
    assert rows[0].bound == "reading" and rows[0].floor == pytest.approx(reading)
    assert rows[0].attained == pytest.approx(0.5)
    operations = 4 * (2 * weights + 4 * layers * 10 * heads * head)
    assert rows[1].bound == "multiplying" and rows[1].floor == pytest.approx(operations / 1e9)


def test_measuring_leaves_no_cache() -> None:
    targets = [DecoderTarget(tiny("llama", torch.float32), runtime) for runtime in ("auto", "stock")]
    gauge = Gauge()
    times = measure_passes(targets, context=8, widths=(1, 3), rounds=2, gauge=gauge)
    assert [list(t) for t in times] == [[1, 3], [1, 3]] and all(s > 0 for t in times for s in t.values())
    assert all(target.cache is None for target in targets)
    machine = gauge.machine()
    assert machine.bandwidth > 1e8 and machine.rate > 1e8


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 2])
def test_figures_of_a_comparison_add_up(batch: int, temperature: float) -> None:
    model, tokenizer = load("nano")
    sides = [
        transformers_side("plain", model),
        truedraft_side("none", truedraft.accelerate(model, tokenizer, draft=None)),
        truedraft_side("lookup", truedraft.accelerate(model, tokenizer, draft="prompt-lookup")),
    ]
    plain, none, lookup = compare(
        sides, STORY, tokenizer, model.device, batch, rounds=2, temperature=temperature, seed=3
    )
    assert [f.differs for f in (plain, none, lookup)] == [None] * 3
    assert plain.tokens == none.tokens == lookup.tokens == 24
    assert plain.speed_up == (1.0, 1.0, 1.0) and plain.passes is None
    assert none.mean_acceptance_length == 1.0 and none.passes == 24 // batch
    assert lookup.mean_acceptance_length >= 1.0 and lookup.passes <= none.passes
    for f in (plain, none, lookup):
        assert f.time_to_first_token and f.time_per_output_token and f.inter_token_latency and f.peak_memory
        assert f.tokens_per_second > 0


def test_differing_side_has_its_divergence_and_no_speed_up() -> None:
    model, tokenizer = load("nano")

    def wrong(inputs: dict[str, Any], settings: dict[str, Any], _: Sequence[Item], clock: Clock) -> Any:
        out = model.generate(**inputs, **settings, streamer=clock)[:, inputs["input_ids"].shape[1] :]
        out[0, -2] += 1
        return out, None

    sides = [transformers_side("plain", model), Side("wrong", wrong)]
    _, found = compare(sides, STORY, tokenizer, model.device, rounds=1)
    assert found.speed_up is None
    assert found.differs is not None and found.differs.startswith("prompt 0, new token 10: ")


def test_latency_of_tokens_of_one_pass_counts_once() -> None:
    measured = comparing.Measured()
    clock = Clock(stamps=[(1.0, 1), (3.0, 4), (4.0, 1)])
    measured.take(clock, 5.0, 6, 1, None)
    assert measured.first == [1.0] and measured.gaps == [2.0, 0.0, 0.0, 0.0, 1.0]
    assert measured.rest == 3.0 and measured.after == 5


@pytest.mark.parametrize("n", [1, 5, 6, 9, 25])
def test_interval_has_its_confidence(n: int) -> None:
    low, high = interval(list(range(n)))
    coverage = 1 - 2 * binom.cdf(low - 1, n, 0.5) - 2 * binom.pmf(low, n, 0.5) if n > 1 else 0.0
    assert (low, high) == (0, n - 1) or coverage >= 0.95
    assert low + high == n - 1


def test_theory_is_the_mean_of_accepted_tokens() -> None:
    rng, rate, length = random.Random(0), 0.7, 4
    total = 0
    for _ in range(200_000):
        accepted = 0
        while accepted < length and rng.random() < rate:
            accepted += 1
        total += accepted + 1
    # standard error 0.0034; five of them
    assert theory(rate, length, 1.0, 1.0) == pytest.approx(total / 200_000, abs=0.017)
    assert theory(1.0, 4, 2.0, 4.0) == 2.5


def test_oracle_has_its_acceptance_rate() -> None:
    model = tiny("llama", torch.float32)
    prompt = {"input_ids": torch.tensor([[5, 6, 7]])}
    given = dict(**prompt, max_new_tokens=120, do_sample=False, pad_token_id=0)
    truth = {0: model.generate(**given)[0].tolist()}
    for rate, passes in ((1.0, 25), (0.0, 120)):  # one token by the prompt's own pass, five by every other
        fast = truedraft.accelerate(model, draft=Oracle(truth, rate, 4, 61), control="fixed")
        assert fast.generate(**given)[0].tolist() == truth[0]
        assert len(fast.report().passes) == passes
    with pytest.raises(Refused):
        truedraft.accelerate(model, draft="oracle")


def test_prompt_files_of_all_formats(tmp_path: Path) -> None:
    spec = tmp_path / "question.jsonl"
    lines = [{"category": "writing", "turns": ["a", "b"]}, {"category": "math", "turns": ["c"]}]
    lines += [{"category": "rag", "turns": ["d"]}] * 3
    spec.write_text("\n".join(json.dumps(line) for line in lines))
    assert [(w.name, [i.text for i in w.items]) for w in from_file(spec, 2)] == [
        ("chat", ["a", "c"]),
        ("rag", ["d"] * 2),
    ]
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": "def f():"}\n'))
    assert from_file(packed, 9)[0] == Workload("HumanEval", (Item("def f():"),))
    edit = tmp_path / "files.jsonl"
    edit.write_text(json.dumps({"text": "x = 1", "instruction": "Rename x."}))
    assert from_file(edit, 9)[0].items[0] == Item("x = 1\n\nRename x.\n", ("x = 1",))
    talk = tmp_path / "traces.jsonl"
    talk.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    assert from_file(talk, 9)[0].items[0] == Item("user: hi\nassistant:", ("hi",))
    plain = tmp_path / "plain.txt"
    plain.write_text("one\n\ntwo\nlines\n")
    assert [i.text for i in from_file(plain, 9)[0].items] == ["one", "two\nlines"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{}", "line 1: no prompt"),
        ("a.jsonl", b'{"prompt": "x"}\nnonsense', "line 2: not JSON"),
        ("a.jsonl", b"[1]", "give an object"),
        ("a.txt", b"\n\n", "no prompts"),
        ("a.txt", b"\xff\xfe", "cannot be read"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
    ],
)
def test_file_without_prompts_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=message):
        from_file(tmp_path / name, 5)


def test_embedded_workloads_are_complete() -> None:
    story, edit, shorten, chat = embedded()
    assert len(story.items) > 2 and len(edit.items) > 2 and len(shorten.items) == 2
    assert all(item.references for workload in (edit, shorten, chat) for item in workload.items)
    assert [len(item.references) for item in chat.items] == [2, 3, 2]
    assert "amount" in chat.items[0].text and "total" in chat.items[0].references[0]


def test_long_prompts_are_truncated_with_a_note() -> None:
    model, tokenizer = load("nano")
    long = Workload("long", (Item("tom and his mom went home. " * 30 + "one day, a little girl"), Item("tom")), 8)
    fast = truedraft.accelerate(model, tokenizer, draft="prompt-lookup")
    sides = [transformers_side("plain", model), truedraft_side("lookup", fast)]
    figures = compare(sides, long, tokenizer, model.device, rounds=1, room=32)
    assert [f.cut for f in figures] == [1, 1] and figures[1].differs is None
    tokenizer.truncation_side = "left"
    read = tokenizer(long.items[0].text, truncation=True, max_length=32)["input_ids"]
    assert len(read) == 32 and tokenizer.decode(read).endswith("one day, a little girl")


def test_references_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "one day", "references": ["tom", "ben"]}))
    assert from_file(tmp_path / "a.jsonl", 1)[0].items == (Item("one day", ("tom", "ben")),)


def test_command_compares_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "page.html"
    options = ["--limit", "1", "--rounds", "1", "--max-new-tokens", "6", "--draft", "prompt-lookup"]
    assert main(["bench", "nano", *options, "--json", "--html", str(html)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {f["workload"] for f in found["figures"]} == {"story", "edit", "shorten", "chat"}
    assert all(f["differs"] is None and f["speed_up"] for f in found["figures"])
    assert found["roofline"][0]["width"] == 1 and html.read_text().startswith("<!doctype html>")
    assert f"truedraft bench nano {' '.join(options)} --json --html {html}" in html.read_text()
    (tmp_path / "prompts.txt").write_text("one day, a little girl")
    assert main(["bench", "nano", *options, "--prompts", str(tmp_path / "prompts.txt")]) == 0
    printed = capsys.readouterr().out
    assert "transformers lookup" in printed and "transformers assisted" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--batch", "-1"], "--batch -1"),
        (["--temperature", "-1"], "must not be negative"),
        (["--draft", "promt-lookup"], "prompt-lookup"),
        (["--max-new-tokens", "2048"], "story: 2048 new tokens leave no room"),
        (["--prompts", "/nowhere.txt"], "/nowhere.txt cannot be read"),
        (["--dtype", "int3"], "--dtype int3"),
        (["--quantize", "int3"], "--quantize int3: choose one of int8, int4"),
        (["--roofline", "--prompts", "a.txt"], "--prompts has no meaning together with --roofline"),
        (["--oracle", "--batch", "1"], "--batch has no meaning together with --oracle"),
        (["--oracle", "--roofline", "--draft", "llma"], "--draft has no meaning together with --oracle and --roofline"),
        (["--roofline", "--oracle", "--no-baselines"], "--baselines has no meaning"),
        (["--lossy", "int8-self"], "choose it with --lossy lossy/int8-self"),
        (["--lossy", "lossy/int8"], "there is no view 'int8': did you mean 'int8-kv' or 'int8-self'"),
        (["--lossy", "lossy/early-exit", "--max-new-tokens", "1"], "two or more new tokens"),
        (["--lossy", "lossy/early-exit", "--oracle"], "--lossy and --oracle measure different things"),
        (["--lossy", "lossy/early-exit", "--ties", "recheck"], "--ties has no meaning together with --lossy"),
        (
            ["--lossy", "lossy/early-exit", "--draft", "int8-self"],
            "drafts for the whole model, and this one generates under lossy/early-exit",
        ),
        (["--html", "/"], "--html / is a folder"),
        (["--html", "/nowhere/page.html"], "/nowhere is no folder"),
        (["--assistant", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_option_is_refused_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "nano", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_diffusion_model_is_compared_with_its_own_forward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, page = tmp_path / "prompts.txt", tmp_path / "page.html"
    prompts.write_text("one day, a little girl")
    arguments = ["bench", "nano-diffusion", "--prompts", str(prompts), "--max-new-tokens", "12", "--rounds", "1"]
    assert main([*arguments, "--draft", "freedave", "--json", "--html", str(page)]) == 0
    alone, none, drafted = json.loads(capsys.readouterr().out)["figures"]
    assert [f["side"] for f in (alone, none, drafted)] == ["its own forward", "no drafts", "freedave"]
    assert all(f["differs"] is None and f["tokens"] == 12 and f["speed_up"] for f in (alone, none, drafted))
    assert alone["passes"] == none["passes"] >= 12 and drafted["passes"] <= none["passes"]
    assert alone["runtime"] == "transformers forward" and none["against_no_drafts"] == none["bound"] == 1
    assert "freedave" in page.read_text()

    def wrong(self: Freedave, row: CanvasRow, policy: Policy, least: float) -> list[Draft]:
        row.canvas.tokens[row.prompt + max(row.emitted, 1) - 1] = 7
        return []

    monkeypatch.setattr(Freedave, "propose", wrong)
    assert main([*arguments, "--draft", "freedave", "--json"]) == 1
    assert "instead of" in json.loads(capsys.readouterr().out)["figures"][2]["differs"]


@pytest.mark.parametrize("flag", [["--ties", "recheck"], ["--oracle"], ["--roofline"], ["--assistant", "nano-draft"]])
def test_what_has_no_meaning_for_a_diffusion_model(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nano-diffusion", *flag]) == 2
    assert f"{flag[0]} has no meaning for a diffusion model" in capsys.readouterr().err


def coarse_ways() -> list[Side]:
    """Ways of a bf16 model: its own, and the engine's without drafts and with them."""
    model, tokenizer = load("nano", "bfloat16")
    return [
        transformers_side("plain", model),
        truedraft_side("no drafts", truedraft.accelerate(model, tokenizer, draft=None)),
        truedraft_side("lookup", truedraft.accelerate(model, tokenizer, draft="prompt-lookup")),
    ]


def test_prompts_of_a_file_are_put_into_the_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of a user, as `generate --chat` has them; refused where there is no template, or nothing for it."""
    (prompts := tmp_path / "prompts.txt").write_text("one day")
    asked, given = list[str](), ["bench", "nano", "--no-baselines", "--rounds", "1", "--chat"]
    model, tokenizer = load("nano")
    monkeypatch.setattr("truedraft.cli.bench.load", lambda *_, **__: (model, tokenizer))
    monkeypatch.setattr(
        "truedraft.bench.compare.compare", lambda sides, load, *_: asked.extend(item.text for item in load.items) or []
    )
    assert main([*given, "--prompts", str(prompts)]) == 2
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    assert main(given) == 2 and not asked
    refused = " ".join(capsys.readouterr().err.split())
    assert "no chat template; drop --chat" in refused and "in the chat template already; drop --chat" in refused
    assert main([*given, "--prompts", str(prompts)]) == 0 and asked == ["<user>one day<assistant>"]


def test_both_equalities_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 some texts differ from the model's by ties, drafted or not: figures, text and page say both alike."""
    monkeypatch.setattr("truedraft.cli.bench._roofline", lambda model: (None, []))  # other tests measure it
    story = Workload("story", embedded()[0].items[:2], 60)
    model, tokenizer = load("nano", "bfloat16")
    sides = coarse_ways()
    found = compare(sides, story, tokenizer, model.device, rounds=1)
    inputs = [tokenizer(item.text, return_tensors="pt", return_token_type_ids=False) for item in story.items]
    settings: Any = dict(max_new_tokens=60, do_sample=False)
    plain, ours = ([m.generate(**x, **settings) for x in inputs] for m in (model, sides[2].fast))
    apart = sum(not torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert apart, "the texts of this test have near-ties"
    for f in found[1:]:
        assert f.as_undrafted is True and not f.as_model and f.differs is None and f.speed_up is not None
        assert f.apart == {"tie": apart} and f.texts == 2
    assert found[0].as_undrafted is None and found[0].as_model and found[0].apart == {}
    prompts, html = tmp_path / "stories.jsonl", tmp_path / "page.html"
    prompts.write_text("".join(json.dumps({"prompt": item.text}) + "\n" for item in story.items))
    args = ["bench", "nano", "--dtype", "bfloat16", "--prompts", str(prompts), "--rounds", "1", "--draft", "llma"]
    assert main([*args, "--max-new-tokens", "60", "--no-baselines", "--html", str(html)]) == 0
    written = html.read_text()
    assert 'class="bad"' not in written and ">identical<" not in written and "as no drafts" in written
    assert f"{apart} of 2 not" in written
    assert f"{apart} of 2 texts differ from those of the model alone: {apart} at near-ties" in written
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{apart} of 2 not" in shown and f"{apart} of 2 texts differ from those of the model alone" in shown


@pytest.mark.parametrize(
    ("texts", "differs", "as_model", "as_undrafted", "apart"),
    [
        ([[1, 2], [3, 4]], False, True, True, {}),
        ([[1, 2], [3, 5]], True, False, False, {"unclassified": 1}),
        ([[1], [3, 5]], True, False, False, {"unclassified": 2}),
    ],
)
def test_in_fp32_the_reference_is_the_model_alone(
    texts: list[list[int]], differs: bool, as_model: bool, as_undrafted: bool, apart: dict[str, int]
) -> None:
    model = tiny("llama", torch.float32)
    undrafted = truedraft_side("no drafts", truedraft.accelerate(model, draft=None))
    sides = [transformers_side("plain", model), undrafted, truedraft_side("x", truedraft.accelerate(model))]
    right = [torch.tensor([ids]) for ids in ([1, 2], [3, 4])]
    calls: Any = [((), {}, 0), ((), {}, 1)]
    found = equalities(sides, [right, right, [torch.tensor([t]) for t in texts]], calls, {"do_sample": False}, print)
    assert [e.differs for e in found[:2]] == [None, None] and found[1].as_undrafted and not found[1].apart
    assert (found[2].differs is not None, not found[2].apart, found[2].as_undrafted) == (
        differs,
        as_model,
        as_undrafted,
    )
    assert found[2].apart == apart and found[2].texts == 2


def test_an_engine_that_drafts_change_is_a_fault_in_red() -> None:
    figures = replace(FIGURES, differs="prompt 0, new token 1: 3 instead of 4", as_undrafted=False, as_model=False)
    figures = replace(figures, apart={"tie": 2, "bug": 1}, texts=4)
    table = columns.speed([figures], 1)
    cells = {column.head: column.cell(figures) for column in table.columns}
    assert cells["as no drafts"] == "NO" and cells["as the model"] == "3 of 4 not" and cells["speed-up"] == ""
    assert 'class="bad">w, batch 1, greedy, x: prompt 0, new token 1' in page.measured("t", {}, [figures], 1)
    tied = replace(figures, differs=None, apart={"tie": 2}, as_undrafted=True)
    assert 'class="bad"' not in page.measured("t", {}, [tied], 1)


FIGURES = Figures("w", "x", 1, 0.0, None, 8, 9.0, None, None, None, 4, 2.0)


@pytest.mark.skipif(not native.library(), reason="no compiled code here")
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_limits_are_measured_for_the_precision_of_the_passes(
    dtype: torch.dtype, precision: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forms: list[int] = []

    multiply = native.library().truedraft_multiply  # type: ignore[union-attr]

    def noted(form: int, steps: int, threads: int) -> int:
        forms.append(form)
        return multiply(form, steps, threads)  # type: ignore[no-any-return]

    monkeypatch.setattr(native.library(), "truedraft_multiply", noted)
    gauge = Gauge(dtype=dtype)
    gauge.sample()
    assert {*forms} == {Form.BF16 if dtype == torch.bfloat16 else Form.FLOAT}
    assert gauge.machine().precision == precision
    title = columns.roofline([RooflinePoint(1, 1.0, 2.0, "reading")], gauge.machine()).title
    assert f"{precision} GFLOP/s" in title


@pytest.mark.parametrize("weights", [["--dtype", "float32"], ["--dtype", "bfloat16"], ["--quantize", "int8"]])
def test_a_roofline_is_not_exceeded(weights: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model that fits into the caches, too."""
    assert main(["bench", "nano", "--roofline", "--json", *weights]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limits"]["precision"] == ("bf16" if "bfloat16" in weights else "fp32")
    assert all(0 < row["attained"] <= 1.15 for row in found["roofline"]), found
    rate = found["limits"]["rate"]
    operations = [row["floor"] * rate / row["width"] for row in found["roofline"] if row["bound"] == "multiplying"]
    assert max(operations, default=0) <= 1.001 * min(operations, default=0)


def test_limits_are_the_highest_samples() -> None:
    gauge = Gauge(working_set=1 << 20)
    gauge._reading, gauge._multiplying = [3.0, 9.0, 4.0], [5.0, 2.0]
    assert gauge.machine() == Machine(9.0, 5.0)
