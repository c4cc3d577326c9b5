"""S3D: drafts and training against a model without some layers, which reads the masks behind a text in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import truedraft
from models import tiny
from test_heads import learner_of
from test_views import COMPILED, CutModel, begun, target_of
from truedraft import DraftTree, Refused, registry
from truedraft.drafters._learned import Batch, save_learnt
from truedraft.drafters.heads.s3d import MaskReader, Masks, Training, middle

LAYERS, SKIPPED, MASKS = 4, (1, 2), 3


def target(architecture: str = "llama") -> PreTrainedModel:
    return tiny(architecture, torch.float32, layers=LAYERS)


def trained(model: PreTrainedModel, **knobs: Any) -> Masks:
    return learner_of("s3d", model, **{"skip": "1-2", "masks": MASKS, **knobs}).module.eval()


@torch.no_grad()
def plain_logits(model: PreTrainedModel, masks: Tensor, tokens: Sequence[int]) -> Tensor:
    """(1 + masks, V) logits at the last token and at masks behind it, of the cut model after the whole model's keys and
    values of the tokens before."""
    cut = CutModel(model, SKIPPED, tokens)
    pending = cut.model.get_input_embeddings()(torch.tensor(tokens[-1:]))
    return cut.model(
        inputs_embeds=torch.cat([pending, masks])[None], past_key_values=cut.committed, use_cache=True
    ).logits[0]


def check_drafts(runtime: str = "auto", **knobs: Any) -> None:
    """In batches of rows of different lengths that leave one by one, with drafts of different depths."""
    model, compared = target(), 0
    masks = trained(model)
    filled = MaskReader.filled

    def checked(self: MaskReader, rows: Sequence[Any], depths: Sequence[int]) -> Tensor:
        nonlocal compared
        logits = filled(self, rows, depths)
        for row, depth, found in zip(rows, depths, logits, strict=True):
            plain = plain_logits(model, masks.mask_embeddings[: depth - 1], row.tokens)
            torch.testing.assert_close(found[:depth], plain, rtol=2e-4, atol=2e-4)
            compared += depth
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MaskReader, "filled", checked)
        draft = registry.load("drafters", "s3d", model=masks, **knobs)
        fast = truedraft.accelerate(model, draft=draft, control="fixed", runtime=runtime)
        ids = torch.randint(1, 61, (3, 24), generator=torch.Generator().manual_seed(2))
        mask = torch.tensor([[1] * 24, [0] * 19 + [1] * 5, [0] * 2 + [1] * 22])
        given: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, eos_token_id=20, pad_token_id=0)
        expected = model.generate(ids, attention_mask=mask, **given)
        trees = list[DraftTree]()
        propose = draft.propose
        draft.propose = lambda *args: trees.extend(made := propose(*args)) or made  # type: ignore[attr-defined]
        assert torch.equal(fast.generate(ids, attention_mask=mask, **given), expected)
    assert compared > 40
    assert max(map(len, trees)) == 1 + knobs.get("nodes", 1 + MASKS)


@pytest.mark.parametrize("runtime", [pytest.param("auto", marks=COMPILED), "stock"])
def test_drafts_are_those_of_the_model_without_the_layers(runtime: str) -> None:
    check_drafts(runtime)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("runtime", [pytest.param("auto", marks=COMPILED), "stock", "graphs"])
def test_a_pass_over_masks_under_a_view(runtime: str, architecture: str) -> None:
    """Of rows with different numbers of masks; the next pass of the whole model is as if there had been none."""
    model = target(architecture)
    masks, prompts, counts = trained(model), [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7]], (MASKS, 1)
    made, again = (begun(target_of(model, runtime), prompts) for _ in range(2))
    trees = [masks.behind(prompt[-1], count) for prompt, count in zip(prompts, counts, strict=True)]
    for prompt, count, found in zip(prompts, counts, made.score(trees, masks.view).logits, strict=True):
        plain = plain_logits(model, masks.mask_embeddings[:count], prompt)
        torch.testing.assert_close(found[: 1 + count], plain, rtol=2e-4, atol=2e-4)
    whole = [DraftTree.chain(prompt[-1], [7, 7, 7, 7]) for prompt in prompts]
    assert torch.equal(made.score(whole).logits, again.score(whole).logits)
    made.cache = again.cache = None


@COMPILED
def test_trees_of_several_tokens_of_each_mask() -> None:
    check_drafts(top_k=3, nodes=6)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "bloom"])
def test_training_computes_what_drafts_do(architecture: str) -> None:
    """At places of texts of different lengths, near and far, in one batch: windows, tables of positions, and biases."""
    model = target(architecture)
    learner = learner_of("s3d", model, skip="1-2", masks=MASKS)
    texts = torch.randint(1, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(20) < torch.tensor([20, 14])[:, None]
    anchors = torch.tensor([[1, 18, 7], [13, 2, 3]])
    logits = learner.block_logits(Batch(texts, mask, mask, {}), anchors)
    assert logits.shape == (2, 3, 1 + MASKS, 61)
    for text, places, found in zip(texts.tolist(), anchors.tolist(), logits, strict=True):
        for place, one in zip(places, found, strict=True):
            plain = plain_logits(model, learner.module.mask_embeddings.detach(), text[: place + 1])
            torch.testing.assert_close(one, plain, rtol=2e-4, atol=2e-4)


def test_training_moves_the_masks_alone_towards_the_text() -> None:
    model = target()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    learner = learner_of("s3d", model, skip="1", masks=2, anchors=8)
    learner.prepare(torch.zeros(61))
    ids = torch.randint(1, 61, (4, 5), generator=torch.Generator().manual_seed(4))
    texts = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    ones = torch.ones_like(texts, dtype=torch.bool)
    batch = Batch(texts, ones, ones & (torch.arange(25) >= 5), {})
    optimizer, losses = torch.optim.Adam(learner.module.parameters(), 0.05), list[float]()
    for _ in range(30):
        torch.manual_seed(0)
        optimizer.zero_grad()
        loss = learner.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert [name for name, _ in learner.module.named_parameters()] == ["mask_embeddings"]


def test_acceptance_in_training_is_that_in_serving() -> None:
    model = target()
    learner = learner_of("s3d", model, skip="1", masks=2)
    ids = torch.randint(1, 61, (4, 5), generator=torch.Generator().manual_seed(4))
    texts = model.generate(ids, max_new_tokens=26, do_sample=False, eos_token_id=None)
    ones = torch.ones_like(texts, dtype=torch.bool)
    measured = learner.evaluate([Batch(texts, ones, ones & (torch.arange(31) >= 5), {})])
    draft = registry.load("drafters", "s3d", model=learner.module.eval())
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    passes = tokens = 0
    for row in ids:
        fast.generate(row[None], max_new_tokens=26, do_sample=False, eos_token_id=None)
        report = fast.report()
        tokens, passes = tokens + report.tokens, passes + report.row_passes
    assert measured["tokens_per_pass"] > 1.1
    assert tokens / passes == pytest.approx(measured["tokens_per_pass"], rel=0.1)


def test_a_draft_leaves_no_trace_in_the_cache() -> None:
    """The passes of the whole model have the bits of those without drafts."""
    model = target()
    fast = truedraft.accelerate(model, draft=registry.load("drafters", "s3d", model=trained(model)), control="fixed")
    plain = truedraft.accelerate(model, draft=None)
    given: dict[str, Any] = dict(
        max_new_tokens=9, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    ids = torch.tensor([[5, 6, 7, 8], [3, 1, 4, 1]])
    mine, theirs = fast.generate(ids, **given), plain.generate(ids, **given)
    assert torch.equal(mine.sequences, theirs.sequences)
    if plain.target.batch_invariant:
        assert all(torch.equal(a, b) for a, b in zip(mine.logits, theirs.logits, strict=True))


@pytest.mark.parametrize(("layers", "skipped"), [(2, "1-1"), (3, "1-1"), (4, "1-2"), (6, "2-4"), (32, "8-23")])
def test_the_middle_half_is_skipped(layers: int, skipped: str) -> None:
    assert middle(layers) == skipped


def test_what_cannot_be_skipped_is_refused(tmp_path: Path) -> None:
    model = target()
    with pytest.raises(Refused, match=r"layers \[4, 5\] cannot be skipped: the decoder has layers 0 to 3"):
        Training(skip="2-5").begin(model)
    with pytest.raises(Refused, match="s3d leaves out layers, and the decoder has one"):
        Training().begin(tiny("llama", torch.float32, layers=1))
    with pytest.raises(Refused, match=r"cannot be skipped|reads an embedding of each token in every layer"):
        Training(skip="1").begin(tiny("gemma3n_text", torch.float32))
    with pytest.raises(Refused, match="keeps states of all its layers"):
        Training(skip="1").begin(tiny("qwen3_5_text", torch.float32))
    with pytest.raises(Refused, match="drafts for the whole model, and this one generates under lossy/skip-layers"):
        truedraft.accelerate(
            model, draft=registry.load("drafters", "s3d", model=trained(model)), view="lossy/skip-layers:layers=1"
        )


def test_a_checkpoint_is_of_one_model(tmp_path: Path) -> None:
    """It gives the masks and the layers that were saved, and is refused for a target of other sizes."""
    model = target()
    learner = learner_of("s3d", model, skip="0;2f", masks=2)
    save_learnt(tmp_path, "s3d", learner.module, model, learner.config())
    draft: Any = registry.load("drafters", "s3d", model=str(tmp_path))
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(
        fast.generate(ids, max_new_tokens=12, do_sample=False), model.generate(ids, max_new_tokens=12, do_sample=False)
    )
    assert torch.equal(draft.head.mask_embeddings, learner.module.mask_embeddings)
    assert draft.head.view.reduction(4) == learner.module.view.reduction(4)
    with pytest.raises(Refused, match="was trained for another model"):
        truedraft.accelerate(tiny("llama", torch.float32, layers=4, vocabulary=53), draft=f"s3d:{tmp_path}")
