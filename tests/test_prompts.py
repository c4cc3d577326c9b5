"""Long prompts: prefilled by the model's own forward into the same cache, each as it is alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import truedraft
from drafters_for_tests import HiddenReader
from models import ARCHITECTURES, RECURRENT, ROUGH, V, ragged, tapped, tiny
from nets import text_net
from truedraft import DraftTree
from truedraft.runtime import forward, native, nodes, processors
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.parts import PartAttention
from truedraft.runtime.programs import PROGRAMS
from truedraft.runtime.quantize import quantize
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Prompt, Scores, Taps

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# all that the own forward reads long prompts for
EVERY = pytest.mark.parametrize("architecture", sorted(PROGRAMS.keys() - RECURRENT))
SEED = 1  # of the prompts
LONG = 24  # of the prompts here, those that are long
WIDTH = tiny().config.hidden_size
TREE = DraftTree((3, 4, 5, 6), (-1, 0, 0, 2))


@pytest.fixture(autouse=True)
def long_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "LONG", dict.fromkeys(processors.LONG, LONG))
    monkeypatch.setattr(processors, "WIDE", WIDTH)


def prompt(n: int, seed: int = 0) -> Prompt:
    return Prompt(torch.randint(1, V, (n,), generator=torch.Generator().manual_seed(1000 * seed + n)))


def bits(target: DecoderTarget, prompts: list[Prompt], capacity: int) -> list[list[Tensor]]:
    """For each row: its first logits, its states, its KV in the cache, and the logits of a tree after it."""
    target.reserve(len(prompts), capacity)
    read = target.prefill(prompts)
    assert target.cache is not None
    kept = [
        [t[i, :, : len(p) - 1].clone() for layer in target.cache.layers for t in (layer.keys, layer.values)]
        for i, p in enumerate(prompts)
    ]
    scored = target.score([TREE] * len(prompts))
    rows = range(len(prompts))
    states = [[state[i] for s in (read, scored) for state in s.hidden.values()] for i in rows]
    target.cache = None
    return [[read.logits[i], scored.logits[i], *states[i], *kept[i]] for i in rows]


def far(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().std())


@pytest.mark.covering(1)
@EVERY
@BOTH
@pytest.mark.parametrize("part", [None, 16])
def test_long_prompt_has_the_same_bits_alone_and_in_a_batch(
    architecture: str, dtype: torch.dtype, part: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any batch, and with any size of the cache, which depends on the drafter."""
    if part:
        monkeypatch.setattr(forward, "WHOLE", 0)
        monkeypatch.setattr(forward, "PART", part)
    target = DecoderTarget(tiny(architecture, dtype))
    target.taps = Taps(tapped(architecture, 0, 1, -1))
    prompts = [
        prompt(37),
        prompt(5),
        prompt(37, seed=1),
        prompt(61),
        prompt(61, seed=1),
        prompt(LONG),
        prompt(LONG - 1),
    ]
    together = bits(target, prompts, 83)
    for i, (p, row) in enumerate(zip(prompts, together, strict=True)):
        (alone,) = bits(target, [p], 71 + i)
        assert all(torch.equal(a, b) for a, b in zip(alone, row, strict=True)), len(p)


@pytest.mark.covering(1)
@EVERY
@BOTH
def test_both_ways_of_prefill_write_the_same_cache_up_to_rounding(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call and in parts; the hidden states for drafters are the same too."""
    if dtype == torch.bfloat16 and any("experts" in name for name in ARCHITECTURES[architecture]):
        pytest.skip("in bf16 a near-tie of experts may be decided differently, and later values differ then")
    model, found = tiny(architecture, dtype), []
    for whole, part in ((forward.WHOLE, 16), (0, 16), (0, 7)):
        monkeypatch.setattr(forward, "WHOLE", whole)
        monkeypatch.setattr(forward, "PART", part)
        for strict in (False, True):
            target = DecoderTarget(model, strict=strict)
            target.taps = Taps(tapped(architecture, 0, 1, 2, -1))
            prompts = [prompt(41, seed=SEED), prompt(30, seed=SEED + 1)]
            found.append(bits(target, prompts, 64))
            assert type(target.runner) is CompiledPass
    tolerance = 2e-5 if dtype == torch.float32 else ROUGH.get(architecture, 0.1)
    for other in found[1:]:
        for row, expected in zip(other, found[0], strict=True):
            assert all(a.shape == b.shape and far(a, b) < tolerance for a, b in zip(row, expected, strict=True))
            assert all(a.dtype == b.dtype for a, b in zip(row, expected, strict=True))


@BOTH
def test_prefill_in_one_call_gives_the_models_logits(dtype: torch.dtype) -> None:
    """Equal to the bit to those of `model.generate` on the prompt alone."""
    model = tiny("llama", dtype)
    fast = truedraft.accelerate(model)
    given: dict[str, Any] = dict(max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)
    ids = prompt(50).ids[None]  # type: ignore[index]
    assert torch.equal(fast.generate(ids, **given).logits[0], model.generate(ids, **given).logits[0])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "olmo", "phimoe"])
def test_text_after_long_prompts_equals_generate(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For short and long prompts together, with compiled passes and with compiled linear layers alone."""
    model = tiny(architecture, torch.float32)
    monkeypatch.setattr(processors, "LONG", dict.fromkeys(processors.LONG, 12))
    inputs = ragged(model, 5)
    assert inputs["attention_mask"].sum(1).tolist() == [5, 8, 11, 14, 17]
    settings = dict(max_new_tokens=20, do_sample=False)
    for name in ("suffix", "oracle", "plain", "taps"):
        text_net(model, name, inputs, **settings)


def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of the lengths of prompts that the model's own forward reads."""
    seen: list[int] = []
    prefill = forward.PromptPass.prefill

    def noted(self: forward.PromptPass, prompts: list[Prompt], taps: Taps) -> Scores:
        seen.extend(map(len, prompts))
        return prefill(self, prompts, taps)

    monkeypatch.setattr(forward.PromptPass, "prefill", noted)
    return seen


@pytest.mark.parametrize(("how", "read"), [({}, [LONG, 40]), ({"strict": True}, []), ({"runtime": "stock"}, [])])
def test_way_of_prefill_depends_on_length_alone(
    how: dict[str, Any], read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without drafts, and with any taps; with strict numerics, compiled passes read them all."""
    model, seen = tiny("llama", torch.float32), prefilled(monkeypatch)
    lengths = [LONG, 3, 40, LONG - 1]
    ids = torch.zeros(4, 40, dtype=torch.long)
    for row, n in zip(ids, lengths, strict=True):
        row[40 - n :] = prompt(n).ids
    mask = torch.stack([torch.arange(40) >= 40 - n for n in lengths]).long()
    for draft in (None, "auto", HiddenReader(vocabulary=V, head=model.get_output_embeddings())):
        fast = truedraft.accelerate(model, draft=draft, control="fixed", **how)
        seen.clear()
        fast.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert seen == read


def test_way_of_prefill_of_embeddings_depends_on_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny("llama", torch.float32), prefilled(monkeypatch)
    embeds = model.get_input_embeddings()(prompt(40).ids)[None]
    given = dict(inputs_embeds=embeds, max_new_tokens=9, do_sample=False)
    fast = truedraft.accelerate(model)
    seen.clear()
    assert torch.equal(fast.generate(**given), model.generate(**given))
    assert seen == [40]


def test_length_limit_depends_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster bf16 units leave shorter prompts to the compiled pass; the limit of fp32 depends on the vendor."""
    monkeypatch.undo()
    found: list[int] = []
    for known in ({"amx_bf16", "avx512_bf16"}, {"avx512_bf16", "GenuineIntel"}, {"avx2"}, set()):
        monkeypatch.setattr(processors, "processor", lambda known=known: frozenset(known))
        found.append(processors.long_prompt(torch.bfloat16, 4096))
        fp32 = [processors.long_prompt(torch.float32, width) for width in (4096, 768, 256)]
        assert fp32 == ([256, 256, 768] if "GenuineIntel" in known else [8192, 8192, 2731])
        small, middle = (processors.long_prompt(torch.bfloat16, width) for width in (256, 768))
        equal = "avx512_bf16" in known and "amx_bf16" not in known
        assert small == (round(middle / 3) if equal else 3 * middle)
    assert found == sorted(found) == [1536, 8192, 16384, 16384]
    monkeypatch.undo()
    assert processors.processor() == frozenset() or len(processors.processor()) > 5


def test_quantised_models_prefill_by_compiled_passes() -> None:
    """Their own forward multiplies by the same products, or dequantises in every call of a layer."""
    pytest.importorskip("torchao")
    model = tiny.__wrapped__("llama", torch.float32)
    assert DecoderTarget(model).long == LONG
    quantize(model, "int8")
    assert DecoderTarget(model).long is None


@pytest.mark.parametrize(
    ("sizes", "spans"),
    [
        ({"WHOLE": 100}, [100]),
        ({"WHOLE": 99, "PART": 32}, [32, 32, 32, 4]),
        ({"ROOM": 1 << 16}, [28, 28, 28, 16]),  # (8 x 32 + 4 x 64 + 100) x 4 + 100 bytes each
        ({"ROOM": 0}, [1] * 100),
    ],
)
def test_prefill_activations_are_bounded(
    sizes: dict[str, int], spans: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call reads more positions than there is room for, and only the last one's logits are made."""
    for name, value in sizes.items():
        monkeypatch.setattr(forward, name, value)
    model = tiny("llama", torch.float32)
    calls: list[tuple[int, int]] = []

    def noted(module: PreTrainedModel, args: Any, kwargs: Any, out: Any) -> None:
        calls.append((kwargs["input_ids"].shape[1], out.logits.shape[1]))

    target = DecoderTarget(model)
    handle = model.register_forward_hook(noted, with_kwargs=True)
    try:
        target.long = LONG
        target.reserve(2, 128)
        target.runner = DecoderTarget(tiny("llama", torch.float32), "stock").runner  # hooks run in forwards only
        target.runner.attach(target.cache)
        target.prefill([prompt(100)])
    finally:
        handle.remove()
    assert calls == [(n, 1) for n in spans]


def masks_of(queries: int, keys: int) -> dict[str, Tensor]:
    """Of the last positions of a text: causal, within a window, and two that are neither."""
    place, own = torch.arange(keys), torch.arange(keys - queries, keys)[:, None]
    causal, holed = place <= own, place <= own
    holed[-1, 0] = False
    return {"causal": causal, "window": causal & (place > own - 3), "holed": holed, "bidirectional": place >= 2}


@BOTH
@pytest.mark.parametrize("kind", masks_of(1, 1))
@pytest.mark.parametrize(("queries", "keys"), [(5, 23), (16, 16), (1, 9)])
def test_attention_of_a_part_is_that_under_its_mask(kind: str, queries: int, keys: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 2, n, 8, generator=generator).to(dtype) for n in (queries, keys, keys))
    mask = masks_of(queries, keys)[kind].expand(queries, keys)[None, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    plain = attend(query.double(), key.double(), value.double(), attn_mask=mask, scale=0.7)
    with PartAttention():
        mine = attend(query, key, value, attn_mask=mask, scale=0.7)
        added = attend(query, key, value, attn_mask=torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf))
    assert mine.dtype == dtype and far(mine, plain) < (1e-5 if dtype == torch.float32 else 0.03)
    assert torch.equal(added, attend(query, key, value, attn_mask=mask)), "masks that are added are left alone"


class KeysRead(TorchFunctionMode):
    """Notes the keys of torch's attention under masks."""

    def __init__(self) -> None:
        super().__init__()
        self.under_masks: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and kwargs["attn_mask"] is not None:
            self.under_masks.append(args[1].shape[-2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("architecture", "keys"), [("llama", set()), ("mistral", {16 + 8})])
def test_parts_read_no_more_keys_than_they_see(
    architecture: str, keys: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without windows there is no mask, and with one the keys are those of the part and those of the window before."""
    monkeypatch.setattr(forward, "WHOLE", 0)
    monkeypatch.setattr(forward, "PART", 16)
    target = DecoderTarget(tiny(architecture, torch.float32))
    target.reserve(1, 128)
    with KeysRead() as seen:
        target.prefill([prompt(96)])
    assert set(seen.under_masks[2 * target.model.config.num_hidden_layers :]) == keys


@pytest.mark.parametrize("how", [{}, {"strict": True}, {"runtime": "stock"}])
def test_what_is_read_is_reported(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """After every call over prompts; Ctrl-C between two of them ends the call, and the next one is not affected."""
    monkeypatch.setattr(forward, "WHOLE", 0)
    monkeypatch.setattr(forward, "PART", 16)
    monkeypatch.setattr(nodes, "PROMPT", 20)
    model = tiny("llama", torch.float32)
    ids = torch.stack([prompt(40).ids, prompt(40, seed=1).ids])  # type: ignore[list-item]
    given: dict[str, Any] = dict(max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
    fast = truedraft.accelerate(model, **how)
    seen: list[tuple[int, int]] = []
    plain = model.generate(ids, **given)
    assert torch.equal(fast.generate(ids, **given, on_read=lambda *read: seen.append(read)), plain)
    ends = {"strict": [20, 40, 60, 80], "runtime": [80]}.get("".join(how), [16, 32, 40, 56, 72, 80])
    assert seen == [(end, 80) for end in ends]

    def interrupt(read: int, total: int) -> None:
        seen.append((read, total))
        raise KeyboardInterrupt

    seen.clear()
    with pytest.raises(KeyboardInterrupt) as raised:
        fast.generate(ids, **given, on_read=interrupt)
    assert seen == [(ends[0], 80)] and torch.equal(raised.value.output, ids)
    assert torch.equal(fast.generate(ids, **given), plain) and len(seen) == 1


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks of memory are read from /proc")
def test_memory_of_a_long_prompt_is_bounded() -> None:
    """Within windows too: in one call their mask would take a byte of each pair of positions, and torch four more."""
    target, length = DecoderTarget(tiny("mistral", torch.float32)), 12_288
    target.reserve(1, length)
    Path("/proc/self/clear_refs").write_text("5")
    before = proc("VmRSS")
    target.prefill([prompt(length)])
    assert proc("VmHWM") - before < 2 * length**2


def proc(name: str) -> int:
    """Bytes of this process's memory, by a name in /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
