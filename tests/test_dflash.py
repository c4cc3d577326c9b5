"""DFlash: published checkpoints against the references, drafts against plain forwards, and training against serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import seq2seq_models
import truedraft
from foreign import FORMATS
from foreign.common import features, opened, randomise, save
from models import V, ragged, tiny
from truedraft import Refused, registry
from truedraft.drafters._learned import save_learnt
from truedraft.drafters.heads._blocks import BlockPass
from truedraft.drafters.heads._checkpoint import read_head
from truedraft.runtime import native
from truedraft.train.batches import Line, Reader
from truedraft.train.loop import Plan, fit
from truedraft.tree import Accepted, Row, Scores

NAMES = ("dflash", "dflash-speculators")
VARIANTS = [(name, variant) for name in NAMES for variant in FORMATS[name].variants]
CONTROLS = [(name, wrong) for name in NAMES for wrong in FORMATS[name].controls]
TOKENS, LATER = [5, 17, 3, 44, 9, 60], [7, 31, 12]


def read(folder: Path, target: PreTrainedModel) -> Any:
    method = registry.method("drafters", "dflash")
    return read_head("dflash", folder, method.formats, target, method.rebuilt).to(target.dtype).eval()


def precise() -> PreTrainedModel:
    """A target in float64, without transformers' eager attention, which takes its softmax in float32."""
    target = FORMATS["dflash"].target(dtype=torch.float64)
    target.set_attn_implementation("sdpa")
    return target


def learner(model: PreTrainedModel, **knobs: Any) -> Any:
    made = registry.method("drafters", "dflash").learner(**knobs)
    made.begin(model)
    return made


def loaded(model: PreTrainedModel, head: Any, **knobs: Any) -> truedraft.Accelerated:
    return truedraft.accelerate(model, draft=registry.load("drafters", "dflash", model=head, **knobs), control="fixed")


def filled(head: Any, target: PreTrainedModel, *parts: list[int]) -> list[Tensor]:
    """The logits of the block after each part of a text, the parts read one after the other beside another row."""
    reader: Any = registry.method("drafters", "dflash").reads(head)
    rows = [Row(0, [8, 2], 2, 40), Row(1, [], 0, 40)]
    reader.start(rows, head.block_size)
    observe(reader, rows[0], target, 0)
    found = []
    for part in parts:
        before = max(len(rows[1].tokens) - 1, 0)
        rows[1].tokens += part
        observe(reader, rows[1], target, before)
        some = rows if not found else rows[1:]
        found.append(head.draft_vocabulary.spread(reader.filled(some)[-1]))
    return found


def observe(reader: Any, row: Row, target: PreTrainedModel, before: int) -> None:
    count = len(row.tokens) - 1 - before
    states = {layer: [features(target, row.tokens, [layer])[before:]] for layer in reader.head.layers}
    reader.observe([row], Scores(torch.zeros(1), states, [0]), [Accepted(tuple(range(count)), row.tokens[-1], False)])


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference in probability."""
    return (found[: len(expected)].softmax(-1) - expected.softmax(-1)).abs().max().item()


# ---------------------------------------------------------------- checkpoints of others


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_blocks_are_those_of_the_reference(name: str, variant: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    target = form.target(dtype=torch.float64)
    form.write(tmp_path, target, 0, **form.variants[variant])
    head = read(tmp_path, target)
    text: list[int] = []
    for part, logits in zip((TOKENS, LATER, [1]), filled(head, target, TOKENS, LATER, [1]), strict=True):
        text += part
        expected = form.logits(tmp_path, target, text, [0] * (head.drafts - 1))
        assert logits.shape == expected.shape and len(logits) == head.block_size - (variant != "from the anchor")
        assert torch.equal(logits.isinf(), expected.isinf())
        assert apart(logits, expected) < 1e-5


@pytest.mark.parametrize(("name", "wrong"), CONTROLS)
def test_errors_of_a_reader_would_show(name: str, wrong: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    target = form.target(dtype=torch.float64)
    form.write(tmp_path, target, 0, **form.controls[wrong])
    (logits,) = filled(read(tmp_path, target), target, TOKENS)
    assert apart(logits, form.logits(tmp_path, target, TOKENS, [0, 0], wrong=wrong)) > 1e-3


@pytest.mark.parametrize("window", [4, 100])
def test_drafts_are_those_of_transformers(window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every pass of its own assisted generation; the first layer has a window."""
    target = precise()
    config = CONFIG_MAPPING["muse_glimmer_assistant"](
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=window, layer_types=["sliding_attention", "full_attention"], block_size=5,
        mask_token_id=96, target_layer_ids=[1, 3, 6], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    assistant = MODEL_MAPPING[type(config)](config).double().eval()
    randomise(assistant, 1)
    assistant.save_pretrained(tmp_path)
    seen: list[tuple[list[int], Tensor]] = []
    candidates = DFlashTokenCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = candidates(self, input_ids, *args, **kwargs)
        if found[1] is not None:
            seen.append((input_ids[0].tolist(), found[1][0].clone()))
        return found

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", noted)
    ids = torch.tensor([TOKENS])
    expected = target.generate(
        ids, assistant_model=assistant, speculation_type="dflash", do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    head = read(tmp_path, target)
    assert head.record()["convention"] == "outputs of blocks" and head.layers == (2, 4, 7)
    assert len(seen) > 5
    for tokens, logits in seen:
        assert apart(filled(head, target, tokens)[0], logits) < 1e-6
    if window == 4:
        for wrong in ([0, 0], [3, 0], [4, 4]):
            head.windows = wrong
            assert apart(filled(head, target, seen[-1][0])[0], seen[-1][1]) > 1e-3
        head.windows = [4, 0]
    assert torch.equal(loaded(target, str(tmp_path)).generate(ids, max_new_tokens=12, do_sample=False), expected)


@pytest.mark.parametrize(
    ("name", "variant", "convention", "layers"),
    [
        ("dflash", {}, "outputs of blocks", (2, 4, 7)),
        ("dflash", dict(ids=None, layers=3), "default", (2, 4, 6)),
        ("dflash", dict(ids=None, layers=1), "default", (5,)),
        ("dflash-speculators", {}, "layers", (2, 4, 8)),
    ],
)
def test_records_keep_how_the_source_numbers_layers(
    name: str, variant: dict, convention: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    target = FORMATS[name].target()
    head = read(FORMATS[name].write(tmp_path, target, 0, **variant), target)
    record = json.loads(json.dumps(head.record()))
    assert record["convention"] == convention and tuple(record["layers"]) == head.layers == layers
    assert record["source"] == {"dflash": "z-lab"}.get(name, "speculators")


ZLAB = {"mask_token_id": 96, "target_layer_ids": [1, 3, 6]}


@pytest.mark.parametrize(
    ("name", "config", "weights", "message"),
    [
        ("dflash", {"dflash_config": 3}, {}, "the dflash_config in its config.json is no object"),
        ("dflash", {"dflash_config": {**ZLAB, "use_swa": True}}, {}, "sliding windows or attention sinks"),
        ("dflash", {"dflash_config": {**ZLAB, "target_layer_ids": [1, 3, 8]}}, {}, "it reads layer 9, but"),
        ("dflash", {"dflash_config": {**ZLAB, "target_layer_ids": [1, 3]}}, {}, "its fc.weight reads 96 numbers, not"),
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 3, 6]}}, {}, "its mask_token_id is None"),
        ("dflash", {"dflash_config": {**ZLAB, "mask_token_id": 97}}, {}, "its mask_token_id is 97"),
        ("dflash", {"block_size": None}, {}, "its block_size is None"),
        ("dflash", {"num_hidden_layers": "2"}, {}, "its num_hidden_layers is '2'"),
        ("dflash", {"dflash_config": {**ZLAB, "target_layer_ids": ["1"]}}, {}, "its target_layer_ids are ['1']"),
        ("dflash", {"num_target_layers": 36}, {}, "its num_target_layers is 36, that of the target 8"),
        ("dflash", {"layer_types": ["sliding_attention"] * 2}, {}, "layers with sliding windows"),
        ("dflash", {"model_type": "gemma"}, {}, "its layers are of the kind 'gemma'"),
        ("dflash", {"hidden_size": 48}, {}, "its hidden_size is 48, that of the target 32"),
        ("dflash", {"vocab_size": 99}, {}, "its vocab_size is 99, that of the target 97"),
        ("dflash", {}, {"markov_head.markov_w1.weight": torch.ones(97, 4)}, "in the layout of DSpark"),
        ("dflash", {}, {"hidden_norm.weight": None}, "lacks hidden_norm.weight"),
        ("dflash", {}, {"fc.weight": None}, "lacks fc.weight"),
        ("dflash", {}, {"norm.weight": torch.ones(16)}, "norm.weight (16,) instead of (32,)"),
        ("dflash-speculators", {"transformer_layer_config": None}, {}, "has no transformer_layer_config"),
        ("dflash-speculators", {"aux_hidden_state_layer_ids": None}, {}, "has no aux_hidden_state_layer_ids"),
        ("dflash-speculators", {"target_hidden_size": 48}, {}, "its target_hidden_size is 48, that of the target 32"),
        ("dflash-speculators", {}, {"d2t": None}, "it lacks d2t: its lm_head has 41 rows, the target 97 tokens"),
        ("dflash-speculators", {}, {"d2t": torch.zeros(40).long()}, "its d2t is 40, that of the target 41"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    name: str, config: dict, weights: dict, message: str, tmp_path: Path
) -> None:
    target = FORMATS[name].target()
    FORMATS[name].write(tmp_path, target, 0)
    settings, found = opened(tmp_path, torch.float32)
    kept = {n: w for n, w in {**found, **weights}.items() if w is not None}
    save(tmp_path, {**settings, **config}, kept, "model.safetensors")
    with pytest.raises(Refused) as error:
        read(tmp_path, target)
    assert message in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_other_targets_and_heads_are_refused() -> None:
    with pytest.raises(Refused, match="dflash needs a head"):
        loaded(tiny(), None)
    eagle: Any = registry.method("drafters", "eagle3").learner()
    eagle.begin(tiny())
    for wrong in (3, eagle.module):
        with pytest.raises(Refused, match="give the folder of a checkpoint, or a DFlashHead"):
            loaded(tiny(), wrong)
    with pytest.raises(Refused, match="dflash cannot draft for"):
        loaded(seq2seq_models.model(), "nowhere")
    with pytest.raises(Refused, match="is no decoder language model"):
        learner(seq2seq_models.model())


# ---------------------------------------------------------------- drafting


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("top_k", [1, 3])
def test_drafts_are_the_likeliest_paths_of_the_reference(name: str, top_k: int, tmp_path: Path) -> None:
    """At every node of every draft, in a batch whose rows have different lengths and leave it one after the other."""
    form, target = FORMATS[name], precise()
    fast = loaded(target, str(form.write(tmp_path, target, 0)), top_k=top_k, nodes=7)
    propose, count = fast.drafter.propose, 0

    def checked(rows: Any, budget: Any) -> Any:
        nonlocal count
        trees = propose(rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            laws = form.logits(tmp_path, target, row.tokens, [0] * 3).softmax(-1)
            deepest = min(4, row.room - row.step - 1)
            likely = laws.topk(top_k).indices.tolist()
            paths = [path for depth in range(1, deepest + 1) for path in product(*likely[:depth])]
            value = {path: float(torch.stack([laws[i, t] for i, t in enumerate(path)]).prod()) for path in paths}
            expected = sorted(paths, key=lambda path: -value[path])[: deepest if top_k == 1 else 7]
            found = [tuple(tree.tokens[n] for n in tree.path(i)[1:]) for i in range(1, len(tree))]
            assert set(found) == set(expected)
            count += len(found)
        return trees

    fast.drafter.propose = checked  # type: ignore[method-assign]
    inputs = ragged(target, 3)
    expected = target.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(fast.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0), expected)
    assert count > 40
    assert fast.drafter.reader._cache is None and not fast.drafter.reader._unread  # type: ignore[attr-defined]


def test_chains_end_where_nothing_is_allowed_or_the_text_ends(tmp_path: Path) -> None:
    """A token that may not be drafted at a position is not; nothing follows an end token."""
    target = precise()
    fast = loaded(target, str(FORMATS["dflash"].write(tmp_path, target, 0)))
    row, chosen = Row(0, [*TOKENS, 1], 6, 40, ends=frozenset({11})), torch.eye(97)
    drafter: Any = fast.drafter
    request = SimpleNamespace(rule=SimpleNamespace(preferred_drafts="likeliest"), chance=None)
    row.request = request  # type: ignore[assignment]
    ended = drafter.drafted(row, chosen[[4, 11, 5, 6]], 9)
    assert ended.tokens == (1, 4, 11)
    nothing = torch.stack([chosen[4], chosen[5] * 0, chosen[6]])
    assert drafter.drafted(row, nothing, 9).tokens == (1, 4)
    assert drafter.drafted(row, nothing[1:], 9).tokens == (1,)
    assert drafter.drafted(row, chosen[[4, 5, 6]], 2).tokens == (1, 4, 5)


def test_drawn_chains_have_the_distributions_of_their_positions(tmp_path: Path) -> None:
    form, target = FORMATS["dflash"], precise()
    draft = registry.load("drafters", "dflash", model=str(form.write(tmp_path, target, 0)), drawn=True)
    fast = truedraft.accelerate(target, draft=draft, control="fixed", rule="rejection")
    propose, drawn = draft.propose, []

    def checked(rows: Any, budget: Any) -> Any:
        trees = propose(rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            if tree.drafted:
                laws = (form.logits(tmp_path, target, row.tokens, [0] * 3) / 0.5).softmax(-1)
                assert tree.draws == "one" and tree.dist[-1] is None
                for node, law in enumerate(tree.dist[:-1]):
                    torch.testing.assert_close(law.double(), laws[node], atol=1e-5, rtol=0)
                drawn.append(tree.tokens[1:])
        return trees

    draft.propose = checked
    torch.manual_seed(0)
    fast.generate(**ragged(target, 3), max_new_tokens=8, do_sample=True, temperature=0.5, top_k=0, pad_token_id=0)
    assert len(set(drawn)) > 10


@pytest.mark.parametrize("vocabulary", [0, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_run_in_compiled_layers(dtype: torch.dtype, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide enough for them, the target's output head included; the same numbers as those of torch's layers."""
    target = FORMATS["dflash"].target(dtype=dtype, hidden_size=384, vocab_size=2000)
    made = learner(target, vocabulary=vocabulary)
    made.prepare(torch.arange(2000))
    head = made.module.to(dtype).eval()
    assert native.library() is None or len(BlockPass(head)._linears) > 2
    (found,) = filled(head, target, TOKENS)
    monkeypatch.setattr(native, "library", lambda: None)
    assert not len(BlockPass(head)._linears)
    assert apart(found.double(), filled(head, target, TOKENS)[0].double()) < (1e-5 if dtype == torch.float32 else 1e-2)


# ---------------------------------------------------------------- training


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", torch.float32)


def responses(model: PreTrainedModel, count: int, seed: int) -> list[Line]:
    """Prompts of different lengths with the model's greedy responses."""
    g = torch.Generator().manual_seed(seed)
    found: list[Line] = []
    for i in range(count):
        prompt = torch.randint(3, V, (1, 2 + i % 3), generator=g)
        text = model.generate(prompt, attention_mask=prompt.ne(-1), max_new_tokens=24, do_sample=False)[0].tolist()
        found.append((text[: prompt.shape[1]], text[prompt.shape[1] :]))
    return found


KINDS = [{"block_size": 5}, {"block_size": 4, "vocabulary": 40, "blocks": 1, "layers": "1x2"}]


@pytest.fixture(scope="module", params=[pytest.param(KINDS[0], marks=pytest.mark.slow), KINDS[1]], ids=str)
def trained(request: pytest.FixtureRequest, target: PreTrainedModel, tmp_path_factory: Any) -> tuple[Any, float, float]:
    """A learner, and its loss before and after a short training."""
    torch.manual_seed(0)
    made = learner(target, **request.param)
    lines = responses(target, 40, seed=1)
    batch = Reader(target, made.needs.hidden)(lines)
    made.prepare(torch.tensor([token for _, response in lines for token in response]).bincount(minlength=V))

    def batches() -> Iterator[Any]:
        while True:
            yield batch

    def loss() -> float:
        with torch.no_grad():
            return float(made.loss(batch))

    before = loss()
    plan = Plan(steps=60, lr=1e-2, warmup=5)
    log = tmp_path_factory.mktemp("dflash") / "log"
    fit(made.module, made.loss, batches(), plan, validate=dict, save=lambda run: None, log=log)
    made.module.eval()
    return made, before, loss()


def test_training_lowers_the_loss(trained: tuple[Any, float, float], target: PreTrainedModel) -> None:
    made, before, after = trained
    assert after < 0.8 * before
    assert not any(p.requires_grad for p in target.parameters())
    matrices, others = made.parameter_groups()
    assert any(p is made.module.fc.weight for p in matrices)
    assert any(p is made.module.mask_embedding for p in others)


def test_blocks_in_training_are_those_of_drafting(trained: tuple[Any, float, float], target: PreTrainedModel) -> None:
    """Logits and labels of every anchor, in a batch with padding; the loss with all anchors, and with one at random."""
    made, lines = trained[0], [(line[0], line[1][: 9 + i]) for i, line in enumerate(responses(target, 3, seed=4))]
    head, batch = made.module, Reader(target, made.needs.hidden)(lines)
    ids = torch.arange(V) if head.draft_token_ids is None else head.draft_token_ids
    width = batch.ids.shape[1]
    with torch.no_grad():
        logits, labels = made._filled(batch, torch.arange(1, width)[None].expand(3, -1))
    terms: list[tuple[float, float]] = []  # of each anchor in the response: loss and weight
    for row, (prompt, response) in enumerate(lines):
        text = prompt + response
        for anchor in range(1, len(text)):
            (drafted,) = filled(head, target, text[: anchor + 1])
            total = weights = 0.0
            torch.testing.assert_close(logits[row, anchor - 1], drafted[:, ids], atol=2e-4, rtol=1e-3)
            for place in range(head.drafts):
                at, label = anchor + 1 + place, int(labels[row, anchor - 1, place])
                token = text[at] if len(prompt) <= at < len(text) else -1
                assert label == (ids.tolist().index(token) if token in ids else -100)
                if label >= 0 and len(prompt) <= anchor < len(text) - 1:
                    total -= 0.8**place * float(drafted[:, ids].log_softmax(-1)[place, label])
                    weights += 0.8**place
            terms.append((total, weights))
    total, weights = (sum(part) for part in zip(*terms, strict=True))
    assert made.loss(batch).item() == pytest.approx(total / weights, rel=1e-3)
    one = learner(target, anchors=1, **KINDS[head.draft_token_ids is not None])
    one.module, first = head, Reader(target, made.needs.hidden)(lines[:1])
    found = {round(one.loss(first).item(), 3) for _ in range(20)}
    each = [a / b for a, b in terms[: sum(map(len, lines[0])) - 1] if b]
    assert len(found) > 3 and all(min(abs(one - other) for other in each) < 2e-3 for one in found)


def test_acceptance_in_training_is_that_in_serving(trained: tuple[Any, float, float], target: PreTrainedModel) -> None:
    """Evaluation on held-out responses gives the passes of decoding them with chains, one at a time."""
    made, held = trained[0], responses(target, 9, seed=2)
    read = Reader(target, made.needs.hidden)
    figures = made.evaluate([read(held[:5]), read(held[5:])])
    fast = loaded(target, made.module)
    drafts = made.module.drafts
    tokens = passes = 0
    for prompt, response in held:
        out = fast.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert out[0].tolist() == prompt + response
        report = fast.report()
        tokens, passes = tokens + report.tokens - 1, passes + len(report.passes) - 1
    assert figures["tokens_per_pass"] == pytest.approx(tokens / passes, abs=1e-3)
    assert tokens / passes > 1.05
    right, tried = [0] * drafts, [0] * drafts
    for prompt, response in held:  # acceptance, from drafts at every position
        text = prompt + response
        for anchor in range(len(prompt), len(text) - 1):
            guesses = filled(made.module, target, text[: anchor + 1])[0].argmax(-1).tolist()
            for place, (guess, token) in enumerate(zip(guesses, text[anchor + 1 :], strict=False)):
                tried[place] += 1
                right[place] += guess == token
                if guess != token:
                    break
    assert figures["acceptance"] == [round(a / b, 4) for a, b in zip(right, tried, strict=True) if b]


def test_checkpoints_are_read_as_written(
    trained: tuple[Any, float, float], target: PreTrainedModel, tmp_path: Path
) -> None:
    made = trained[0]
    save_learnt(tmp_path, "dflash", made.module, target, made.config())
    found, own = read(tmp_path, target).state_dict(), made.module.state_dict()
    assert own.keys() == found.keys() and all(torch.equal(own[n], found[n]) for n in own)
    again = learner(target, **{name: getattr(made, name) for name in ("blocks", "block_size", "vocabulary", "layers")})
    again.resume(json.loads(json.dumps(made.config())), own)
    assert all(torch.equal(a, b) for a, b in zip(own.values(), again.module.state_dict().values(), strict=True))
    with pytest.raises(Refused, match="give the same knobs"):
        learner(target, block_size=9).resume(json.loads(json.dumps(made.config())), own)


def test_texts_without_a_block_have_no_loss(target: PreTrainedModel) -> None:
    made = learner(target)
    batch = Reader(target, made.needs.hidden)([([5, 6], [7]), ([5, 6, 7], [8])])
    assert made.loss(batch) == 0 and made.evaluate([batch]) == {"tokens_per_pass": 0.0, "acceptance": []}


def test_layers_are_the_published_ones_where_the_target_has_them() -> None:
    deep = FORMATS["dflash"].target()
    assert learner(deep, blocks=1).module.layers == (5,) and learner(deep, blocks=3).module.layers == (2, 4, 6)
    assert learner(tiny(), blocks=5).module.layers == (1, 1, 2)
    assert learner(deep, layers="1x8").module.layers == (1, 8)
