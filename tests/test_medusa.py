"""Medusa's heads: checkpoints of three layouts, exact drafts, training, and its figures against decoding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import seq2seq_models
import truedraft
from foreign import FORMATS, Foreign
from models import V, ragged, tiny
from truedraft import Refused, registry
from truedraft.drafters._learned import Learner, save_learnt
from truedraft.runtime import native
from truedraft.train.batches import Line, Reader
from truedraft.train.loop import Plan, fit

NAMES = ("medusa", "medusa-2", "medusa-vllm")
VARIANTS = [(name, variant) for name in NAMES for variant in FORMATS[name].variants]
CONTROLS = [(name, wrong) for name in NAMES for wrong in FORMATS[name].controls]
TOKENS = [5, 17, 3, 44, 9, 60]


def loaded(model: PreTrainedModel, folder: Any, **knobs: Any) -> truedraft.Accelerated:
    draft = registry.load("drafters", "medusa", model=folder, **knobs)
    return truedraft.accelerate(model, draft=draft, control="fixed")


def learner(model: PreTrainedModel, **knobs: Any) -> Any:
    made = registry.method("drafters", "medusa").learner(**knobs)
    made.begin(model)
    return made


# ---------------------------------------------------------------- checkpoints of others


def precise(form: Foreign) -> PreTrainedModel:
    """A target in float64, without transformers' eager attention, which takes its softmax in float32."""
    target = form.target(dtype=torch.float64)
    target.set_attn_implementation("sdpa")
    return target


def compared(name: str, folder: Path, wrong: str, **variant: Any) -> float:
    """The largest difference in probability between the loaded heads and the reference."""
    form = FORMATS[name]
    target = precise(form)
    form.write(folder, target, 0, **variant)
    heads: Any = loaded(target, folder).drafter.heads
    expected = form.logits(folder, target, TOKENS, [8, 2, 4], wrong=wrong)
    with torch.no_grad():
        states = target.get_decoder()(torch.tensor([TOKENS[:-1]])).last_hidden_state[0, -1]
        found = heads(states)
    if heads.draft_token_ids is not None:
        wide = found.new_full((len(found), target.config.vocab_size), -torch.inf)
        wide[:, heads.draft_token_ids] = found
        found = wide
    assert found.shape == expected.shape
    return (found.softmax(-1) - expected.softmax(-1)).abs().max().item()


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_foreign_heads_equal_the_reference(name: str, variant: str, tmp_path: Path) -> None:
    assert compared(name, tmp_path / "heads", "", **FORMATS[name].variants[variant]) < 1e-6


@pytest.mark.parametrize(("name", "wrong"), CONTROLS)
def test_errors_of_a_reader_would_show(name: str, wrong: str, tmp_path: Path) -> None:
    assert compared(name, tmp_path / "heads", wrong, **FORMATS[name].controls[wrong]) > 1e-3


def test_drafts_are_those_of_the_reference(tmp_path: Path) -> None:
    """In a batch whose rows have different lengths, after every pass."""
    form = FORMATS["medusa-vllm"]
    target = precise(form)
    folder = form.write(tmp_path / "heads", target, 0, kept=29)
    fast = loaded(target, folder, top_k=1)
    propose, count = fast.drafter.propose, 0

    def checked(rows: Any, budget: Any) -> Any:
        nonlocal count
        trees = propose(rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            expected = form.logits(folder, target, row.tokens, [0, 0, 0]).argmax(-1).tolist()
            assert list(tree.tokens[1:]) == expected[: len(tree) - 1]
            count += len(tree) - 1
        return trees

    fast.drafter.propose = checked  # type: ignore[method-assign]
    fast.generate(**ragged(target, 3), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert count > 20


def test_blocks_that_are_one_module_may_be_stored_once(tmp_path: Path) -> None:
    form = FORMATS["medusa"]
    target = form.target()
    folder = form.write(tmp_path / "heads", target, 0, layers=2)
    whole: Any = loaded(target, folder).drafter.heads
    weights = torch.load(folder / form.file, weights_only=True)
    torch.save({n: t for n, t in weights.items() if ".1.linear" not in n}, folder / form.file)
    found: Any = loaded(target, folder).drafter.heads
    for a, b in zip(whole.parameters(), found.parameters(), strict=True):
        assert torch.equal(a, b)


def test_incomplete_heads_are_refused(tmp_path: Path) -> None:
    form = FORMATS["medusa"]
    target = form.target()
    folder = form.write(tmp_path / "heads", target, 0)
    weights = torch.load(folder / form.file, weights_only=True)
    torch.save({n: t for n, t in weights.items() if n != "2.1.weight"}, folder / form.file)
    with pytest.raises(Refused, match=r"lacks lm_heads\.2\.weight"):
        loaded(target, folder)
    other = form.target(hidden_size=64)
    form.write(folder, target, 0)
    with pytest.raises(Refused, match=r"\(32, 32\) instead of \(64, 64\)"):
        loaded(other, folder)


# ---------------------------------------------------------------- drafting


@pytest.mark.covering(1)
@pytest.mark.parametrize("knobs", [{}, {"dynamic": False}, {"top_k": 1}, {"nodes": 63}], ids=str)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_text_is_that_of_the_model(sample: bool, knobs: dict[str, Any]) -> None:
    model = tiny()
    heads = learner(model).module
    fast = loaded(model, heads, **knobs)
    kwargs: dict[str, Any] = dict(max_new_tokens=30, do_sample=sample, eos_token_id=[11, 12], pad_token_id=0)
    inputs = ragged(model, 4)
    torch.manual_seed(1)
    expected = model.generate(**inputs, **kwargs)
    torch.manual_seed(1)
    assert torch.equal(fast.generate(**inputs, **kwargs), expected)


@pytest.mark.parametrize("knobs", [{}, {"own_head": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_run_in_compiled_layers(dtype: torch.dtype, knobs: dict[str, Any]) -> None:
    """Wide enough for them; the drafts of a call are those of torch's layers at the same states."""
    model = FORMATS["medusa"].target(dtype=dtype, hidden_size=384, vocab_size=2000)
    made = learner(model, heads=2, **knobs)
    for parameter in made.module.blocks.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.05)
    fast = loaded(model, made.module, top_k=1)
    drafter: Any = fast.drafter
    assert native.library() is None or len(drafter._linears) == (4 if made.own_head else 3)
    propose, count = drafter.propose, 0

    def checked(rows: Any, budget: Any) -> Any:
        nonlocal count
        trees = propose(rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            with torch.no_grad():
                logits = made.module(drafter._states[id(row)])
            for place, token in enumerate(tree.tokens[1:]):
                assert logits[place].max() - logits[place, token] <= 0.05
                count += 1
        return trees

    drafter.propose = checked
    inputs = ragged(model, 2)
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    found = fast.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert dtype == torch.bfloat16 or torch.equal(found, expected)
    assert count >= 10


def test_static_tree_has_the_paths_likeliest_right() -> None:
    """Against all paths of ranks; the second head is right more often at its second rank."""
    model = tiny()
    heads = learner(model, heads=3).module
    heads.accuracy[:, :3] = torch.tensor([[0.5, 0.3, 0.07], [0.2, 0.41, 0.01], [0.37, 0.13, 0.11]])
    drafter: Any = loaded(model, heads, nodes=9).drafter
    accuracy = heads.accuracy.double()
    paths = [path for depth in (1, 2, 3) for path in product(range(4), repeat=depth)]
    value = {path: float(torch.stack([accuracy[i, r] for i, r in enumerate(path)]).prod()) for path in paths}
    expected = sorted(paths, key=lambda path: -value[path])[:9]
    tree = drafter._tree
    assert [tuple(tree.tokens[node] for node in tree.path(i)[1:]) for i in range(1, len(tree))] == expected


def test_encoder_decoders_and_missing_heads_are_refused() -> None:
    with pytest.raises(Refused, match="medusa needs a head"):
        loaded(tiny(), None)
    with pytest.raises(Refused, match="give the folder of a checkpoint, or a MedusaHeads"):
        loaded(tiny(), 3)
    with pytest.raises(Refused, match="medusa cannot draft for"):
        loaded(seq2seq_models.model(), "nowhere")
    with pytest.raises(Refused, match="is no decoder language model"):
        learner(seq2seq_models.model())
    for knobs in ({"rank": 8, "own_head": False}, {"rank": 32}):
        with pytest.raises(Refused, match="medusa:rank="):
            learner(tiny(), **knobs)


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


KINDS = [{}, {"rank": 24}, {"own_head": False, "blocks": 2}]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def trained(request: pytest.FixtureRequest, target: PreTrainedModel, tmp_path_factory: Any) -> tuple[Any, float, float]:
    """A learner, and its loss before and after a short training."""
    torch.manual_seed(0)
    made, read = learner(target, heads=3, **request.param), Reader(target, (-1,))
    batch = read(responses(target, 40, seed=1))

    def batches() -> Iterator[Any]:
        while True:
            yield batch

    with torch.no_grad():
        before = float(made.loss(batch))
    log = tmp_path_factory.mktemp("medusa") / "log"
    fit(
        made.module,
        made.loss,
        batches(),
        Plan(steps=60, lr=1e-2, warmup=5),
        validate=dict,
        save=lambda run: None,
        log=log,
    )
    with torch.no_grad():
        return made, before, float(made.loss(batch))


def test_training_lowers_the_loss(trained: tuple[Any, float, float]) -> None:
    made, before, after = trained
    assert after < 0.9 * before
    assert not any(p.requires_grad for p in made.module.target[0].parameters())


def test_evaluation_equals_decoding(trained: tuple[Any, float, float], target: PreTrainedModel) -> None:
    """Evaluation on held-out responses gives the passes of decoding them with chains, one at a time."""
    made: Learner = trained[0]
    held = responses(target, 9, seed=2)
    figures = made.evaluate([Reader(target, (-1,))(held[:5]), Reader(target, (-1,))(held[5:])])
    fast = loaded(target, made.module, top_k=1, nodes=3)
    tokens = passes = 0
    right, tried = [0] * 3, [0] * 3
    for prompt, response in held:
        out = fast.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert out[0].tolist() == prompt + response
        report = fast.report()
        tokens, passes = tokens + report.tokens - 1, passes + len(report.passes) - 1
    assert figures["tokens_per_pass"] == pytest.approx(tokens / passes, abs=1e-3)
    assert 1.05 < tokens / passes < 4
    read = Reader(target, (-1,))
    for line in held:  # acceptance, from the heads' logits at every position
        states, text = read([line]).features[-1][0], line[0] + line[1]
        with torch.no_grad():
            guesses = made.module(states).argmax(-1).tolist()
        for i in range(len(line[0]) - 1, len(text) - 2):
            for place, (guess, token) in enumerate(zip(guesses[i], text[i + 2 :], strict=False)):
                tried[place] += 1
                right[place] += guess == token
                if guess != token:
                    break
    assert figures["acceptance"] == [round(a / b, 4) for a, b in zip(right, tried, strict=True)]


def test_accuracies_are_stored_by_rank(trained: tuple[Any, float, float], target: PreTrainedModel) -> None:
    made, held = trained[0], responses(target, 3, seed=3)
    made.evaluate([Reader(target, (-1,))(held)])
    hits, tried = torch.zeros(3, 10), torch.zeros(3, 1)
    for line in held:
        text = line[0] + line[1]
        with torch.no_grad():
            order = made.module(Reader(target, (-1,))([line]).features[-1][0]).argsort(-1, descending=True)
        for i, head in product(range(len(line[0]) - 1, len(text)), range(3)):
            if i + head + 2 < len(text):
                tried[head] += 1
                hits[head] += order[i, head, :10] == text[i + head + 2]
    assert torch.allclose(made.module.accuracy, hits / tried)


def test_checkpoints_are_read_as_written(
    trained: tuple[Any, float, float], target: PreTrainedModel, tmp_path: Path
) -> None:
    made = trained[0]
    save_learnt(tmp_path, "medusa", made.module, target, made.config())
    found: Any = loaded(target, tmp_path).drafter.heads
    own, read = made.module.state_dict(), found.state_dict()
    assert own.keys() == read.keys() and all(torch.equal(own[n], read[n]) for n in own)
    shape = made.module.shape
    again = learner(target, heads=3, blocks=shape.blocks, rank=shape.rank, own_head=shape.output == "each")
    again.resume(made.config(), own)
    assert all(torch.equal(a, b) for a, b in zip(own.values(), again.module.state_dict().values(), strict=True))
    with pytest.raises(Refused, match="give the same knobs"):
        learner(target, heads=2).resume(made.config(), own)
    with pytest.raises(Refused, match="was trained for another model"):
        loaded(tiny("qwen2", torch.float32, vocabulary=53), tmp_path)


@pytest.mark.parametrize("rank", [0, 24])
def test_untrained_heads_have_the_targets_logits(target: PreTrainedModel, rank: int) -> None:
    """With a rank, the nearest of that rank: the singular values that it leaves out remain."""
    heads, weight = learner(target, rank=rank).module, target.lm_head.weight.detach()
    states = torch.eye(target.config.hidden_size)
    with torch.no_grad():
        error = (heads.logits(1, states).mT - weight).norm()
    left = torch.linalg.svdvals(weight)[rank or len(states) :].norm()
    assert torch.allclose(error, left, rtol=1e-3, atol=1e-4)
