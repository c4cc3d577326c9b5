"""The compiled pass with the bits of `model.generate`: whole models, and each operation beside torch's own."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

import truedraft
from drafters_for_tests import Noise
from models import ARCHITECTURES, tiny
from test_ties import PROMPTS, generated
from truedraft.runtime import generate_pass, native, orders, panels
from truedraft.runtime.generate_pass import GeneratePass
from truedraft.runtime.linears import Product
from truedraft.runtime.processors import processor
from truedraft.runtime.tokenwise import TokenwisePass
from truedraft.runtime.weights import linear_weight

WIDE = dict(hidden_size=128, intermediate_size=208, head_dim=32)  # torch computes smaller products by other code
pytestmark = pytest.mark.skipif(
    "avx512_bf16" not in processor() or processor().isdisjoint({"AuthenticAMD", "GenuineIntel"}),
    reason="torch's orders are known for processors with AVX512-BF16: MKL has other code elsewhere",
)


@cache
def wide(name: str = "llama") -> PreTrainedModel:
    with mock.patch.dict(ARCHITECTURES, {name: {**ARCHITECTURES[name], **WIDE}}):
        made: PreTrainedModel = tiny.__wrapped__(name, torch.bfloat16, 1.5)
    return made


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm3", "olmo2", "granite"])
def test_passes_have_the_bits_of_generate(name: str) -> None:
    """Every logit of a text of many drafts, ragged in their sizes, is that of `model.generate`."""
    model: Any = wide(name)
    kept: dict[str, Any] = dict(
        return_dict_in_generate=True, output_logits=True, max_new_tokens=60, do_sample=False, pad_token_id=0
    )
    fast = truedraft.accelerate(model, draft=Noise(), control="fixed", ties="recheck")
    assert isinstance(fast.target.runner, GeneratePass)
    for prompt in PROMPTS[:2]:
        expected = model.generate(torch.tensor([prompt]), **kept)
        out = fast.generate(torch.tensor([prompt]), **kept)
        assert torch.equal(out.sequences, expected.sequences)
        assert torch.equal(torch.stack(out.logits), torch.stack(expected.logits).float())
    assert "to the bit" in fast.report().reference and not fast.report().notes


def test_long_texts_have_the_bits_of_generate() -> None:
    """Where torch adds up keys in two parts, and where it reads a prompt of another width."""
    model: Any = wide()
    model.config.max_position_embeddings = 1024
    prompt = torch.randint(3, 60, (1, 505), generator=torch.Generator().manual_seed(2))
    kept: dict[str, Any] = dict(return_dict_in_generate=True, output_logits=True, max_new_tokens=30, do_sample=False)
    fast: Any = truedraft.accelerate(model, draft=Noise(), control="fixed", ties="recheck")
    expected, out = model.generate(prompt, **kept), fast.generate(prompt, **kept)
    assert torch.equal(torch.stack(out.logits), torch.stack(expected.logits).float())
    assert isinstance(fast.target.runner, GeneratePass)


def attention(queries: Tensor, keys: Tensor, values: Tensor, seen: Any, scale: float) -> Tensor:
    """Compiled attention in the mode that this processor has."""
    mode = orders.attention_mode(queries.shape[1], len(keys), queries.shape[2], scale)
    assert mode is not None
    return orders.attention_alone(mode, queries, keys, values, seen, scale)


def test_attention_over_any_number_of_keys_is_that_of_torch() -> None:
    """Of several heads that share keys, of sizes that are no multiple of sixteen, beyond the keys added up first."""
    torch.manual_seed(3)
    for heads, kv_heads, size in ((10, 2, 24), (3, 3, 40)):
        seen = torch.randint(1, 600, (8,)).tolist() + [1, 16, 17, 512, 513, 640, 1100, 1101]
        queries, keys, values = (
            torch.randn(*sizes, size).to(torch.bfloat16)
            for sizes in ((len(seen), heads), (kv_heads, 1101), (kv_heads, 1101))
        )
        found = attention(3 * queries, keys, values, seen, 0.3)
        for query, count, result in zip(3 * queries, seen, found, strict=True):
            expected = functional.scaled_dot_product_attention(
                query[None, :, None], keys[None, :, :count], values[None, :, :count], scale=0.3, enable_gqa=True
            )
            assert torch.equal(expected[0, :, 0], result), count


@pytest.mark.parametrize("shape", [(896, 4864), (1536, 8960), (576, 1536), (128, 896)])
def test_products_of_real_layers_are_those_of_torch(shape: tuple[int, int]) -> None:
    """Of Qwen2.5 0.5B and 1.5B and SmolLM2: oneDNN adds up long rows in parts, with AMX in equal ones."""
    out, inner = shape
    torch.manual_seed(inner)
    layer = nn.Linear(inner, out).to(torch.bfloat16).requires_grad_(False)
    weight = panels.panels(linear_weight(layer, torch.bfloat16))
    columns, library = orders.columns_alone(layer, weight), native.library()
    assert columns is not None and library is not None
    x = torch.randn(40, inner).to(torch.bfloat16)
    expected = torch.cat([layer(token[None, None])[0] for token in x])
    assert torch.equal(Product(library, weight, torch.bfloat16, columns)(x), expected)


@pytest.mark.parametrize("left", [3, 11])
def test_exponentials_of_keys_that_fill_no_vector_are_those_of_torch(left: int) -> None:
    """Of a score that expf() rounds the other way: their sum differs by a few units in the last place, which shows in
    one of ten thousand results. The first key has the highest score, so that the score is not moved."""
    heads, size, low = 2000, 64, -200.0
    torch.manual_seed(left)
    query, keys = torch.zeros(1, heads, size), torch.zeros(heads, 16 + left, size)
    query[..., :4] = 1.0
    keys[:, 1:16, 3], keys[:, 16:, :3] = low, torch.tensor(orders.ROUNDED)
    values = torch.randn(heads, 16 + left, size).to(torch.bfloat16)
    query, keys = query.to(torch.bfloat16), keys.to(torch.bfloat16)
    found = attention(query, keys, values, [16 + left], 1.0)
    expected = functional.scaled_dot_product_attention(query[:, :, None], keys[None], values[None], scale=1.0)
    assert torch.equal(expected[:, :, 0], found)


@pytest.mark.parametrize("width", [24, 100, 576, 2080, 17000])
def test_norms_are_those_of_torch(width: int) -> None:
    """The mean of squares of rows with few vectors, with levels of sums, and with numbers that fill no vector."""
    torch.manual_seed(width)
    rows = torch.randn(12, width).to(torch.bfloat16).float()
    expected = [row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + orders.EPSILON) for row in rows[:, None]]
    assert torch.equal(orders.norm_alone(rows), torch.cat(expected))


def test_activations_are_those_of_torch() -> None:
    """By one number at a time, and by many."""
    numbers = torch.randn(1000).to(torch.bfloat16)
    at = numbers.view(torch.int16).to(torch.int32) & 0xFFFF
    for name, function in (("silu", functional.silu), ("gelu", functional.gelu)):
        found = generate_pass.table_of(name)[at]
        assert torch.equal(found, function(numbers))
        assert torch.equal(found, torch.cat([function(number[None]) for number in numbers]))


def one_key_more(mode: int, queries: Tensor, keys: Tensor, values: Tensor, seen: Any, scale: float) -> Tensor:
    return right(mode, queries, keys, values, [min(count + 1, keys.shape[1]) for count in seen], scale)


def mean_in_order(rows: Tensor) -> Tensor:
    return rows.pow(2).cumsum(-1)[:, -1:] / rows.shape[1]


right = orders.attention_alone


@pytest.mark.parametrize("fault", ["attention", "products", "norms", "activations"])
def test_other_bits_are_noticed_before_they_are_used(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A key too many, other orders of columns and squares, one activation in a thousand: another forward is used."""
    model = wide()
    if fault == "attention":
        monkeypatch.setattr(orders, "_attention", {})
        monkeypatch.setattr(orders, "attention_alone", one_key_more)
    elif fault == "products":
        monkeypatch.setattr(orders, "_products", {})
        monkeypatch.setattr(orders, "COLUMNS", (64,))
        monkeypatch.setattr(orders, "PARTS", 1)
    elif fault == "norms":
        monkeypatch.setattr(orders, "_norms", {})
        monkeypatch.setattr(orders, "norm_alone", lambda rows: rows * torch.rsqrt(mean_in_order(rows) + orders.EPSILON))
    else:
        table = generate_pass.table_of("silu").clone()
        table[::1000] *= 2
        monkeypatch.setattr(generate_pass, "table_of", lambda name: table)
    fast = truedraft.accelerate(model, ties="recheck")
    assert isinstance(fast.target.runner, TokenwisePass)
    assert generated(fast, PROMPTS[0], do_sample=False) == generated(model, PROMPTS[0], do_sample=False)


def test_every_comparison_of_attention_holds() -> None:
    """For numbers of heads and sizes that the models here do not have."""
    for shape in ((6, 2, 24, 0.2), (5, 5, 72, 0.1)):
        mode = orders.attention_mode(*shape)
        assert mode is not None and all(orders._attention_alike(mode, *shape))


def test_comparisons_tell_one_order_from_the_other() -> None:
    """The other mode of attention fails where products show their order: of keys, and of values."""
    shape = 6, 2, 64, 0.2
    right = orders.attention_mode(*shape)
    for other in set(orders.attention_modes()) - {right}:
        assert list(orders._attention_alike(other, *shape))[-2:] == [False, False]


def test_sums_of_softmaxes_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that differ by the last bit of a sum in fp32, as few as another order changes."""

    def rounded(mode: int, queries: Tensor, keys: Tensor, values: Tensor, seen: Any, scale: float) -> Tensor:
        result = right(mode, queries, keys, values, seen, scale)
        if set(seen) == {orders.FEW}:
            result.view(-1)[::60_000] *= 1 + 2**-7
        return result

    mode = orders.attention_mode(4, 2, 32, 0.25)
    assert mode is not None
    monkeypatch.setattr(orders, "attention_alone", rounded)
    assert list(orders._attention_alike(mode, 4, 2, 32, 0.25)) == [True, False, True, True, True, True]


def test_orders_are_measured_again_for_another_number_of_threads() -> None:
    model, threads = wide(), torch.get_num_threads()
    fast = truedraft.accelerate(model, draft=Noise(), control="fixed", ties="recheck")
    runner = fast.target.runner
    try:
        for count in (threads + 1, threads):
            torch.set_num_threads(count)
            assert fast.target.changed
            assert generated(fast, PROMPTS[0], do_sample=False) == generated(model, PROMPTS[0], do_sample=False)
            assert not fast.target.changed and isinstance(fast.target.runner, GeneratePass)
    finally:
        torch.set_num_threads(threads)
    assert fast.target.runner is not runner


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        ("mistral", torch.bfloat16, "some of its layers have no full attention"),
        ("bloom", torch.bfloat16, "there is attention that torch does not compute"),
        ("llama", torch.float32, "it is in float32, not in bfloat16"),
    ],
)
def test_reports_say_why_near_ties_are_scored_again(name: str, dtype: torch.dtype, why: str) -> None:
    fast = truedraft.accelerate(tiny(name, dtype, 1.5), ties="recheck")
    generated(fast, PROMPTS[0], do_sample=False)
    assert [note for note in fast.report().notes if "scored again" in note and note.endswith(why)]


def test_errors_that_are_no_forward_s_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise KeyError("a fault of this package")

    monkeypatch.setattr(generate_pass, "_order", broken)
    with pytest.raises(KeyError, match="fault"):
        truedraft.accelerate(wide(), ties="recheck")
