"""Models that generate under a view, by explicit choice: the text is that of the lighter model behind the whole model's
prompt, whatever is drafted, and is labelled."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

import truedraft
from models import ragged, tiny
from test_seq2seq import sources
from test_seq2seq import tiny as seq2seq
from test_view_bits import coarse, rounded_after
from test_view_entries import unwindowed
from test_views import COMPILED, LAYERS, cut, deep
from truedraft import Refused, registry
from truedraft.bench.lossy import approximations, qualities
from truedraft.bench.workloads import Item, Workload
from truedraft.cli import main
from truedraft.drafters.heads._exits import FirstLayers
from truedraft.loading import load
from truedraft.runtime.graphs import GraphPass
from truedraft.views.skip_layers import SkipLayers

NEW = 24
SKIPPED = (1, 2)
SKIPS = "lossy/skip-layers:layers=1;2"
WINDOW = "lossy/window-kv:sinks=2,recent=5"
DECAYS = "lossy/d3:layers=1;2,alpha=0.98"
SHORT = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
RUNTIMES = [pytest.param("auto", marks=COMPILED), "stock"]
DEEP = "lossy/d3:layers=1;2;9,alpha=0.95"  # the third one is left out after some tokens


def prompt_of(model: PreTrainedModel, length: int = 9) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))


def new_tokens(fast: Any, ids: Tensor, **settings: Any) -> list[int]:
    out = fast.generate(ids, attention_mask=torch.ones_like(ids), **{**SHORT, **settings})
    return out[0, ids.shape[1] :].tolist()


@torch.no_grad()
def by_steps(model: Any, ids: Tensor, skipped_at: Callable[[int], Sequence[int]]) -> list[int]:
    """Greedy tokens: the first by the whole model, each later one without the layers of its step, whose keys and values
    are kept by layer."""
    whole = DynamicCache()
    found = [int(model(ids, past_key_values=whole, use_cache=True).logits[0, -1].argmax())]
    kept = [(layer.keys, layer.values) for layer in whole.layers]
    for step in range(NEW - 1):
        run = [i for i in range(LAYERS) if i not in skipped_at(step)]
        cache = DynamicCache()
        for new, old in enumerate(run):
            cache.update(*kept[old], new)
        logits = cut(model, skipped_at(step))(torch.tensor([found[-1:]]), past_key_values=cache, use_cache=True).logits
        for new, old in enumerate(run):
            kept[old] = cache.layers[new].keys, cache.layers[new].values
        found.append(int(logits[0, -1].argmax()))
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("draft", ["none", "auto", "suffix+token-recycling"])
def test_text_without_layers_whatever_is_drafted(draft: str, runtime: str) -> None:
    model = deep("llama", torch.float32)
    ids = prompt_of(model)
    fast = truedraft.accelerate(model, draft=draft, control="fixed", view=SKIPS, runtime=runtime)
    expected = by_steps(model, ids, lambda _: SKIPPED)
    assert new_tokens(fast, ids) == expected != model.generate(ids, **SHORT)[0, 9:].tolist()
    assert (fast.report().mean_acceptance_length > 1) == (draft != "none")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_text_of_falling_depth(runtime: str) -> None:
    model = deep("llama", torch.float32)
    ids = prompt_of(model)
    fast = truedraft.accelerate(model, draft=None, view=DECAYS, runtime=runtime)
    count = [LAYERS - int(LAYERS * 0.98 ** (step + 1)) for step in range(NEW)]
    assert sorted(set(count)) == [1, 2]
    assert new_tokens(fast, ids) == by_steps(model, ids, lambda step: SKIPPED[: count[step]])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_text_over_a_window(runtime: str) -> None:
    """By one forward over the whole text, under a mask."""
    model = deep("llama", torch.float32)
    ids = prompt_of(model)
    found = new_tokens(truedraft.accelerate(model, draft=None, view=WINDOW, runtime=runtime), ids)
    text = torch.cat([ids, torch.tensor([found])], 1)
    at = torch.arange(text.shape[1])
    sees = (at <= at[:, None]) & ((at < 2) | (at >= at[:, None] - 5) | (at[:, None] < ids.shape[1]))
    mask = torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)[None, None]
    with torch.no_grad():
        logits = unwindowed(model)(text, attention_mask=mask).logits[0, ids.shape[1] - 1 : -1]
    assert found == logits.argmax(-1).tolist() != model.generate(ids, **SHORT)[0, 9:].tolist()


@COMPILED
def test_text_in_fewer_bits() -> None:
    model = coarse("llama", torch.float32)
    ids = prompt_of(model)
    fast = truedraft.accelerate(model, draft="suffix", view="lossy/int4-self")
    text = ids[0].tolist()
    with torch.no_grad():
        found = [int(model(ids).logits[0, -1].argmax())]
        oracle = rounded_after(model, "int4", [*text, found[0]])
        while len(found) < NEW:
            found.append(int(oracle.logits(found)[-1].argmax()))
    assert new_tokens(fast, ids) == found != model.generate(ids, **SHORT)[0, 9:].tolist()


@pytest.mark.parametrize("view", [SKIPS, WINDOW, DECAYS, "lossy/top-kv:entries=4,recent=4"])
def test_rows_of_a_batch_are_those_alone(view: str) -> None:
    model = deep("llama", torch.float32)
    batch = ragged(model, 3)
    fast = truedraft.accelerate(model, draft=None, view=view)
    together = fast.generate(**batch, **SHORT)[:, batch["input_ids"].shape[1] :]
    for row, (ids, mask) in enumerate(zip(*batch.values(), strict=True)):
        assert new_tokens(fast, ids[mask.bool()][None]) == together[row].tolist()


def test_rows_that_end_early_do_not_change_the_depth_of_others() -> None:
    model = deep("llama", torch.float32)
    batch = ragged(model, 3)
    fast = truedraft.accelerate(model, draft=None, view=DECAYS)
    alone = [new_tokens(fast, ids[mask.bool()][None]) for ids, mask in zip(*batch.values(), strict=True)]
    end = next(row[i] for row in alone[:2] for i in range(5, 13) if row[i] not in row[:i])  # before layers are dropped
    given = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=end, pad_token_id=0)
    together = fast.generate(**batch, **given)[:, batch["input_ids"].shape[1] :].tolist()
    for row, tokens in enumerate(alone):
        length = tokens.index(end) + 1 if end in tokens else NEW
        assert together[row][:length] == tokens[:length]
    assert any(end not in tokens[:16] for tokens in alone)


def test_requests_that_come_and_go() -> None:
    model = deep("llama", torch.float32)
    for view in (SKIPS, WINDOW):
        fast = truedraft.accelerate(model, draft=None, view=view)
        prompts = [prompt_of(model, n) for n in (4, 17, 9)]
        alone = [
            new_tokens(fast, ids, max_new_tokens=n, min_new_tokens=n)
            for ids, n in zip(prompts, (20, 6, 9), strict=True)
        ]
        with fast.engine(max_rows=2, max_tokens=64, prefix_bytes=1 << 20) as engine:
            requests = [
                engine.add_request(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False)
                for ids, n in zip(prompts, (20, 6, 9), strict=True)
            ]
            while engine.has_unfinished_requests():
                engine.step()
        assert [request.result() for request in requests] == alone


def test_sampled_text_does_not_depend_on_drafts() -> None:
    model = deep("llama", torch.float32)
    ids = prompt_of(model)
    found = []
    for draft in ("none", "suffix-wide"):
        torch.manual_seed(5)
        found.append(new_tokens(truedraft.accelerate(model, draft=draft, view=SKIPS), ids, do_sample=True))
    torch.manual_seed(5)
    whole = new_tokens(truedraft.accelerate(model, draft=None), ids, do_sample=True)
    assert found[0] == found[1] != whole


@COMPILED
def test_encoder_decoders() -> None:
    model = seq2seq("bart")
    given = dict(max_new_tokens=16, do_sample=False, num_beams=1)
    fast = truedraft.accelerate(model, draft="auto", view="lossy/skip-layers:layers=0")
    text = fast.generate(**sources(), **given)
    assert text.equal(cut(model, (0,)).generate(**sources(), **given))
    assert not text.equal(model.generate(**sources(), **given))


def test_the_report_and_the_model_s_description_name_the_view() -> None:
    model = deep("llama", torch.float32)
    fast = truedraft.accelerate(model, draft=None, view=SkipLayers("1"))
    new_tokens(fast, prompt_of(model))
    report = fast.report()
    assert report.guarantee == report.reference == "none"
    assert "lossy/skip-layers is lossy: this is not the text that the model alone would generate" in report.notes[-1]
    assert "under lossy/skip-layers" in repr(fast) and "under lossy/skip-layers" in report.runtime
    again = copy.deepcopy(fast)
    assert new_tokens(again, prompt_of(model)) == new_tokens(fast, prompt_of(model))


def test_captured_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a substitute for capture; costs are measured by the plain forwards that passes under views are."""
    model = deep("llama", torch.float32)
    ids = prompt_of(model)
    fast = truedraft.accelerate(model, draft="suffix", view=SKIPS, runtime="stock")
    fast.target.runner = GraphPass(fast.target.runner, lambda run: run)
    fast.target.runner.cold = True
    assert new_tokens(fast, ids) == by_steps(model, ids, lambda _: SKIPPED)
    assert fast.report().runtime == "transformers forward under lossy/skip-layers" and not fast.target.cold


def test_costs_are_those_of_the_view() -> None:
    model = deep("llama", torch.float32)
    whole, lossy = (truedraft.accelerate(model, view=view).target for view in (None, SKIPS))
    assert lossy.weight_bytes < 0.8 * whole.weight_bytes and lossy.cost_key != whole.cost_key


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (dict(view="skip-layers"), r"choose it with view='lossy/skip-layers', or let it draft .* draft='skip-layers'"),
        (dict(view="lossy/skip-layer"), "there is no view 'skip-layer': did you mean 'skip-layers'"),
        (dict(view="lossy/skip-layers:depth=4"), "depth is a knob of drafts"),
        (dict(view="lossy/skip-layers:layers=9"), "9"),
        (dict(view=DEEP, draft=None), r"layers \[9\]"),
        (dict(view=FirstLayers(2), draft=None), "has no output head, and generates no tokens"),
        (dict(view="lossy/window-kv+nonsense"), "there is no view 'nonsense'"),
        (dict(view=3), "view=3: give a View"),
        (dict(view=WINDOW), "lossy/window-kv what a token reads depends on its position.* use draft='none'"),
        (dict(view=DECAYS, draft="suffix"), "use draft='none'"),
        (
            dict(view=SKIPS, draft="early-exit"),
            "drafts for the whole model, and this one generates under lossy/skip-layers",
        ),
        (dict(view=SKIPS, ties="recheck"), "ties='recheck' is for the model's own text"),
        (dict(view="lossy/sleb"), "sleb has no layers to skip"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        truedraft.accelerate(deep("llama", torch.float32), **settings)


def test_calls_that_are_refused() -> None:
    model = deep("llama", torch.float32)
    ids = prompt_of(model)
    with pytest.raises(Refused, match="use draft='none'"):
        new_tokens(truedraft.accelerate(model, draft=None, view=WINDOW), ids, prompt_lookup_num_tokens=3)
    with pytest.raises(Refused, match="rows that began at different times run different layers: use generate"):
        truedraft.accelerate(model, draft=None, view=DECAYS).engine()
    with pytest.raises(Refused, match="cannot"):
        truedraft.accelerate(tiny("mamba2", torch.float32), draft=None, view=SKIPS)


def test_a_view_that_leaves_out_nothing_is_the_model() -> None:
    model = deep("llama", torch.float32)
    ids = prompt_of(model)
    for view in ("lossy/window-kv", "lossy/top-kv", "lossy/skip-layers:share=0.0"):
        fast = truedraft.accelerate(model, draft=None, view=view)
        assert new_tokens(fast, ids) == model.generate(ids, **SHORT)[0, 9:].tolist()
        assert fast.report().guarantee == "none"


def test_every_view_may_be_chosen() -> None:
    for name in [*registry.names("views"), *registry.presets("views")]:
        view = registry.lossy_view(f"lossy/{name}")
        assert view.lossy == f"lossy/{view.name}" and view.name in (name, *registry.presets("views"))


def by_hand(model: Any, texts: Sequence[Sequence[int]], **given: Any) -> tuple[float, list[Tensor]]:
    """The perplexity of the second halves of texts but their first tokens, and the likeliest tokens there."""
    losses, best = [], []
    for text in texts:
        with torch.no_grad():
            logits = model(torch.tensor([text]), **given).logits[0, len(text) // 2 : -1].double()
        later = torch.tensor(text[len(text) // 2 + 1 :])
        losses.append(-logits.log_softmax(-1)[torch.arange(len(later)), later])
        best.append(logits.argmax(-1))
    return float(torch.cat(losses).mean().exp()), best


def test_the_quality_that_is_reported_is_that_of_a_masked_forward() -> None:
    """Of the whole model by its own forward; over a window by a forward of all layers under a mask, one text long."""
    model, tokenizer = load("nano")
    text = "one day, tom and ben went to the park. ben saw a red ball, and tom saw a big dog. the dog ran to the ball."
    ids = tokenizer(text)["input_ids"]
    views = ["lossy/window-kv:sinks=1,recent=4", "lossy/window-kv"]
    ways = approximations(model, tokenizer, views, ["none"], "cost")
    whole, window, nothing = qualities(ways, tokenizer, Workload("w", (Item(text),), 99), None, print)
    perplexity, best = by_hand(model, [ids])
    assert whole.perplexity == pytest.approx(perplexity, rel=1e-3) and whole.agreement == 1.0
    assert (nothing.perplexity, nothing.agreement) == (whole.perplexity, 1.0)
    at, half = torch.arange(len(ids)), len(ids) // 2
    sees = (at <= at[:, None]) & ((at < 1) | (at >= at[:, None] - 4) | (at[:, None] < half))
    mask = torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)[None, None]
    perplexity, masked = by_hand(model, [ids], attention_mask=mask)
    assert window.perplexity == pytest.approx(perplexity, rel=1e-3)
    assert window.agreement == pytest.approx(float((masked[0] == best[0]).double().mean()))
    assert window.agreement < 1 and window.tokens == len(ids) - half - 1


def test_command_reports_quality_beside_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--limit", "1", "--rounds", "1", "--max-new-tokens", "8", "--lossy", "lossy/skip-layers:layers=3"]
    html = tmp_path / "page.html"
    assert main(["bench", "nano", *options, "--draft", "none", "--draft", "auto", "--json", "--html", str(html)]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["no drafts", "lossy/skip-layers:layers=3", "lossy/skip-layers:layers=3, auto"]
    assert [q["side"] for q in found["quality"][:3]] == names == [f["side"] for f in found["figures"][:3]]
    whole, lossy, drafted = found["quality"][:3]
    assert whole["agreement"] == 1 > lossy["agreement"] == drafted["agreement"]
    assert whole["perplexity"] < lossy["perplexity"] == drafted["perplexity"]
    assert found["figures"][1]["against_no_drafts"] and "Lossy: another text" in html.read_text()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one day, a little girl")
    assert main(["bench", "nano", *options, "--prompts", str(prompts)]) == 0
    printed = capsys.readouterr().out
    assert "Lossy: another text" in printed and "agreement" in printed and "speed-up" not in printed


def test_commands_generate_under_a_view(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "nano", "one day, a little girl", "--max-new-tokens", "12", "--json"]
    assert main([*command, "--view", "lossy/skip-layers:layers=2;3"]) == 0
    lossy = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    assert lossy["guarantee"] == "none" and json.loads(capsys.readouterr().out)["token_ids"] != lossy["token_ids"]
    assert main([*command, "--view", "skip-layers"]) == 2
    assert "choose it with --view lossy/skip-layers" in capsys.readouterr().err
    assert main(["serve", "nano", "--view", "lossy/skip-layer", "--check"]) == 2
    assert "did you mean 'skip-layers'" in capsys.readouterr().err
