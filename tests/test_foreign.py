"""The references of foreign checkpoints against themselves: layouts against each other, errors of readers, names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from foreign import FORMATS, Foreign
from foreign.common import V, embedding, features, head, layer, opened, random_model, rms_norm
from foreign.eagle3 import LLAMA3

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


@pytest.mark.covering(1)
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


def layer_table(prefix: str, inputs: int, size: int, norms: str = "", wide: int = 56) -> dict[str, tuple[int, ...]]:
    """Of a decoder layer of 4 heads and 2 of keys, each of `size` channels, whose attention reads `inputs` channels."""
    table = {f"self_attn.{n}_proj.weight": (h * size, inputs) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    table |= {"self_attn.o_proj.weight": (32, 4 * size), "mlp.down_proj.weight": (32, wide)}
    table |= {f"mlp.{n}_proj.weight": (wide, 32) for n in ("gate", "up")}
    table |= {f"{n}.weight": (32,) for n in ("post_attention_layernorm", *norms.split())}
    return {prefix + name: shape for name, shape in table.items()}


def qk_norms(prefix: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}self_attn.{n}_norm.weight": (size,) for n in "qk"}


def each(count: int, **shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """`{name with @ for the number}: shape`, for every number below `count`."""
    return {name.replace("@", str(i)): shape for i in range(count) for name, shape in shapes.items()}


VOCABULARY = {"d2t": (41,), "t2d": (V,), "lm_head.weight": (41, 32)}
EAGLE3 = {"fc.weight": (32, 96), "norm.weight": (32,)} | VOCABULARY
EMBEDDED = {"embed_tokens.weight": (V, 32)}
DFLASH = {"fc.weight": (32, 96), "norm.weight": (32,), "hidden_norm.weight": (32,)}
DFLASH |= layer_table("layers.0.", 32, 10, "input_layernorm") | layer_table("layers.1.", 32, 10, "input_layernorm")
DFLASH |= qk_norms("layers.0.", 10) | qk_norms("layers.1.", 10)
HYDRA = {f"hydra_mlp.{i}.0.{n}.weight": (32, (i + 2) * 32) for i in range(4) for n in ("linear", "res_connection")}
HYDRA |= {f"hydra_mlp.{i}.0.{n}.bias": (32,) for i in range(4) for n in ("linear", "res_connection")}
HYDRA |= each(4, **{"hydra_lm_head.@.weight": (V, 32), "hydra_lm_head.@.bias": (V,)})
PREFIXED = {name.replace(".0.linear", ".1.linear").replace(".0.res", ".1.res"): HYDRA[name] for name in HYDRA}
PREFIXED = {re.sub(r"^(hydra_lm_head\.\d\.)", r"\g<1>1.", name): shape for name, shape in PREFIXED.items()}
PREFIXED |= layer_table("prefix_embeding_layer.layers.0.", 32, 8, "input_layernorm", 40)
PREFIXED |= {"prefix_embeding_layer.norm.weight": (32,), "prefix_embeding_layer.embed_tokens.weight": (V, 32)}
PREFIXED |= {"prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
MEDUSA = each(4, **{"@.0.linear.weight": (32, 32), "@.0.linear.bias": (32,), "@.1.weight": (V, 32)})
MEDUSA2 = each(4, **{f"@.{j}.linear.weight": (32, 32) for j in (0, 1)} | {"@.2.weight": (V, 32)})
MEDUSA2 |= each(4, **{f"@.{j}.linear.bias": (32,) for j in (0, 1)})
SPECULATOR = each(3, **{"emb.@.weight": (V, 24), "head.@.weight": (V, 24), "ln.@.weight": (24,), "ln.@.bias": (24,)})
SPECULATOR |= {"proj.0.weight": (24, 32), "proj.1.weight": (24, 24), "proj.2.weight": (24, 24)}
TABLES: list[tuple[str, dict, dict[str, tuple[int, ...]]]] = [
    ("eagle", {}, {"fc.weight": (32, 64), "fc.bias": (32,)} | EMBEDDED | layer_table("layers.0.", 32, 8)),
    ("eagle3", {}, EAGLE3 | layer_table("midlayer.", 64, 10, "input_layernorm hidden_norm")),
    ("eagle3-speculators", {}, EAGLE3 | EMBEDDED | layer_table("layers.0.", 64, 10, "input_layernorm hidden_norm")),
    (
        "eagle3-speculators",
        dict(layers=2, kind="qwen3", norm_before_fc=True),
        EAGLE3
        | EMBEDDED
        | {"input_norm.weight": (96,)}
        | layer_table("layers.0.", 64, 10, "input_layernorm hidden_norm")
        | layer_table("layers.1.", 32, 10, "input_layernorm")
        | qk_norms("layers.0.", 10)
        | qk_norms("layers.1.", 10),
    ),
    ("medusa", {}, MEDUSA),
    ("medusa", dict(layers=2), MEDUSA2),
    (
        "medusa-vllm",
        dict(kept=29, bias=False),
        each(4, **{"blocks.@.layers.0.weight": (32, 32), "lm_heads.@.weight": (29, 32)}) | {"token_map": (29,)},
    ),
    ("hydra", {}, HYDRA),
    ("hydra", dict(arch="prefix-mlp"), PREFIXED),
    ("mlp-speculator", {}, {f"speculator.{name}": shape for name, shape in SPECULATOR.items()}),
    ("dflash", {}, DFLASH),
    ("dflash-speculators", {}, DFLASH | EMBEDDED | VOCABULARY),
]


@pytest.mark.parametrize(("name", "variant", "table"), TABLES)
def test_writers_store_the_published_names_and_shapes(name: str, variant: dict, table: dict, tmp_path: Path) -> None:
    form = FORMATS[name]
    folder = form.write(tmp_path / "head", form.target(), 0, **variant)
    assert {path.name for path in folder.iterdir()} == {"config.json", form.file}
    _, weights = opened(folder, torch.float32)
    assert {n: tuple(t.shape) for n, t in weights.items()} == table
    for n, tensor in weights.items():
        assert len(tensor.unique()) > min(len(tensor) // 2, 4) or n == "t2d", f"{n} is not random"


MTP_DEEPSEEK = ["embed_tokens", "shared_head.head", "shared_head.norm", "enorm", "hnorm", "eh_proj"]
MTP_QWEN = ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]


@pytest.mark.parametrize(
    ("name", "added"),
    [(name, {f"model.layers.3.{n}.weight" for n in MTP_DEEPSEEK}) for name in ("mtp-deepseek", "mtp-glm")]
    + [("mtp-qwen", {f"mtp.{n}.weight" for n in MTP_QWEN}), ("medusa-2", {f"medusa_head.{n}" for n in MEDUSA})],
)
def test_heads_inside_a_checkpoint_stand_beside_the_targets_own_names(
    name: str, added: set[str], tmp_path: Path
) -> None:
    form = FORMATS[name]
    target = form.target()
    _, weights = opened(form.write(tmp_path / "model", target, 0), torch.float32)
    target.save_pretrained(tmp_path / "target")
    _, plain = opened(tmp_path / "target", torch.float32)
    if name.startswith("mtp"):  # whose block is stored as the last one of the target is
        prefix = "mtp.layers.0." if name == "mtp-qwen" else "model.layers.3."
        block = {n.replace("model.layers.2.", prefix): t for n, t in plain.items() if "model.layers.2." in n}
        assert all(weights[n].shape == tensor.shape for n, tensor in block.items())
        added = added | block.keys()
    assert weights.keys() == plain.keys() | added
    assert all(torch.equal(weights[n], tensor) for n, tensor in plain.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    loaded.set_experts_implementation("eager")
    assert torch.equal(features(loaded, TOKENS, [-1]), features(target, TOKENS, [-1])), "transformers reads the target"


LLAMA3_SCALED = dict(rope_parameters=LLAMA3 | dict(rope_theta=500.0))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", dict(attention_bias=True, rms_norm_eps=1e-3)), ("llama", LLAMA3_SCALED), ("qwen2", {}), ("qwen3", {})],
)
def test_the_plain_layer_is_that_of_transformers(kind: str, changes: dict, tmp_path: Path) -> None:
    shape = dict(vocab_size=V, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    config = CONFIG_MAPPING[kind](**shape | dict(intermediate_size=40, head_dim=10 if kind != "qwen2" else 8) | changes)
    if kind == "qwen2":
        config.head_dim = 8
    model = random_model(config, 0, torch.float64)
    weights = {n: t.detach() for n, t in model.state_dict().items()}
    x = embedding(model)[TOKENS[:-1]]
    for at in range(3):
        x = layer(x, weights, f"model.layers.{at}.", config)
        torch.testing.assert_close(features(model, TOKENS, [at + 1]), x, atol=1e-5, rtol=1e-5)
    x = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    torch.testing.assert_close(features(model, TOKENS, [-1]), x, atol=1e-5, rtol=1e-5)
    judge = model(torch.tensor([TOKENS[:-1]])).logits[0]
    torch.testing.assert_close(x @ head(model).T, judge, atol=1e-5, rtol=1e-5)
    assert torch.equal(features(model, TOKENS, [0, 3]).chunk(2, dim=-1)[0], embedding(model)[TOKENS[:-1]])
