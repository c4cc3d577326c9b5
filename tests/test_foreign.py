"""The references of foreign checkpoints against themselves: layouts against each other, errors of readers, names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from foreign import FORMATS, Foreign
from foreign.common import V, opened

TOKENS, DRAFTED = [5, 17, 3, 44, 9, 60], [8, 2]
VARIANTS = [(name, variant) for name, form in FORMATS.items() for variant in form.variants]
CONTROLS = [(name, wrong) for name, form in FORMATS.items() for wrong in form.controls]


def drafted(form: Foreign, folder: Path, seed: int = 0, wrong: str = "", **variant: object) -> Tensor:
    target = form.target(dtype=torch.float64)
    path = folder if folder.exists() else form.write(folder, target, seed, **variant)
    return form.logits(path, target, TOKENS, DRAFTED, wrong=wrong)


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_variant_gives_a_law_of_the_targets_vocabulary(name: str, variant: str, tmp_path: Path) -> None:
    logits = drafted(FORMATS[name], tmp_path / "head", **FORMATS[name].variants[variant])
    assert logits.shape == (1 + len(DRAFTED), V) and logits.dtype == torch.float64
    assert not logits.isnan().any() and (logits < float("inf")).all()
    assert (logits.softmax(-1).max(-1).values < 0.99).all(), "errors would hide in a law of one token"


@pytest.mark.parametrize(("name", "wrong"), CONTROLS)
def test_errors_of_readers_change_the_logits(name: str, wrong: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    right = drafted(form, tmp_path / "head", **form.controls[wrong])
    other = drafted(form, tmp_path / "head", wrong=wrong)
    assert (right.softmax(-1) - other.softmax(-1)).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "kind"), [(name, form.kind) for name, form in FORMATS.items()])
def test_rows_depend_on_what_their_kind_names(name: str, kind: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    target = form.target(dtype=torch.float64)
    folder = form.write(tmp_path / "head", target, 0)
    one, other = (form.logits(folder, target, TOKENS, [first, 2]) for first in (8, 9))
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(one[i], other[i]) == (kind == "parallel") for i in (1, 2))
    last = form.logits(folder, target, TOKENS, [8, 3])
    assert torch.allclose(last[:2], one[:2]), "a row depends on no later draft"


@pytest.mark.parametrize(
    ("one", "first", "other", "second"),
    [
        ("eagle3", {}, "eagle3-speculators", dict(norm_before_residual=False)),
        ("eagle3", dict(ids=(2, 4, 5)), "eagle3", {}),
        ("eagle3", dict(ids=(1, 3, 6)), "eagle3-speculators", dict(ids=(2, 4, 7), norm_before_residual=False)),
        (
            "eagle3",
            dict(fc_norm=True, norm_output=True, draft_vocab=None, embedded=True),
            "eagle3-speculators",
            dict(fc_norm=True, norm_output=True, draft_vocab=None, own_embeddings=True, norm_before_residual=False),
        ),
        ("medusa", {}, "medusa-2", {}),
        ("medusa", dict(layers=2, aliased=False), "medusa-vllm", dict(layers=2)),
        ("medusa-vllm", dict(kept=29), "medusa-vllm", dict(kept=29, cut=False)),
    ],
)
def test_the_same_weights_in_two_layouts_draft_the_same(
    one: str, first: dict, other: str, second: dict, tmp_path: Path
) -> None:
    found = drafted(FORMATS[one], tmp_path / "one", **first), drafted(FORMATS[other], tmp_path / "other", **second)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["eagle3", "eagle3-speculators"])
def test_offsets_of_the_draft_vocabulary_increase_and_agree_with_the_membership(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    _, weights = opened(form.write(tmp_path / "head", form.target(), 0), torch.float32)
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    assert weights["d2t"].dtype == torch.int64 and weights["t2d"].dtype == torch.bool
    assert (ids.diff() > 0).all() and torch.equal(ids, weights["t2d"].nonzero()[:, 0])
    reachable = drafted(form, tmp_path / "again").isfinite()
    assert all(torch.equal(row.nonzero()[:, 0], ids) for row in reachable)


@pytest.mark.parametrize("name", ["mtp-deepseek", "mtp-glm"])
@pytest.mark.parametrize("layers", [1, 3])
def test_stored_prediction_layers_draft_as_those_of_transformers(name: str, layers: int, tmp_path: Path) -> None:
    """`transformers` loads the folder by itself; the pattern of names names the published number of layers alone."""
    form = FORMATS[name]
    target = form.target(dtype=torch.float64)
    folder = form.write(tmp_path / "model", target, 0, layers=layers)
    n = target.config.num_hidden_layers
    target.config.name_or_path, target.config.num_mtp_layers = str(folder), layers
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{n + depth}\." for depth in range(layers)]
    judge, cache = MtpModel.from_pretrained(target).eval(), MtpCache(config=target.config.get_mtp_config())
    ids, rows = torch.tensor([TOKENS + DRAFTED]), []
    with torch.no_grad():
        states = target(ids[:, : len(TOKENS) - 1], output_hidden_states=True).hidden_states[-1]
        for depth in range(layers):
            positions = torch.arange(len(TOKENS) - 1)[None] + 1 + depth
            later = ids[:, 1 + depth :][:, : len(TOKENS) - 1]
            states = judge.forward_layer(depth, states, positions, cache, input_ids=later)
            rows.append(judge._project_to_logits(states)[0, -1])
    found = form.logits(folder, target, TOKENS, DRAFTED[: layers - 1])
    torch.testing.assert_close(found, torch.stack(rows), atol=1e-5, rtol=1e-5)
