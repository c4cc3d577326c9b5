"""Quantised checkpoints of others: their weights to the bit, their texts, and what is refused."""

from __future__ import annotations

import copy
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import quantised
import truedraft
from models import ARCHITECTURES, ragged
from peaks import forget_peak, resident
from test_kernels import SETS
from test_runtime import assert_same_bits
from truedraft import Refused
from truedraft.cli import main
from truedraft.errors import Note
from truedraft.loading import load_tokenizer
from truedraft.planning.models import sized
from truedraft.runtime import checkpoints, native, panels, processors, releasing
from truedraft.runtime.checkpoints._blocks import BLOCKS
from truedraft.runtime.released import trim
from truedraft.serve.config import ServeConfig
from truedraft.serve.plan import planned
from truedraft.targets.decoder import DecoderTarget

pytest.importorskip("torchao.utils", reason="torchao is not installed")
from truedraft.runtime.packed import PackedTensor

pytestmark = pytest.mark.filterwarnings("ignore:.*predicts plain English")  # of models with random weights

compiled = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")

FOLDERS: dict[str, tuple[Any, ...]] = {
    "gptq": ("gptq", dict(bits=4)),
    "gptq-asymmetric": ("gptq", dict(bits=4, symmetric=False, version=2)),
    "gptq-8": ("gptq", dict(bits=8)),
    "gptq-2": ("gptq", dict(bits=2, symmetric=False)),
    "awq": ("awq", {}),
    "w4a16": ("compressed", dict(bits=4)),
    "w4a16-asymmetric": ("compressed", dict(bits=4, symmetric=False)),
    "w4a16-channel": ("compressed", dict(bits=4, strategy="channel", symmetric=False)),
    "w8a16": ("compressed", dict(bits=8, strategy="channel")),
    "int8": ("compressed", dict(layout="int-quantized", bits=8, strategy="channel")),
    "int8-tensor": ("compressed", dict(layout="int-quantized", bits=8, strategy="tensor")),
}
EXACT = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# kept in bytes, where the processor does not read blocks as they are
EIGHT = {"gptq-8", "w8a16", "int8", "int8-tensor", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "Q5_K", "Q6_K"}
PROJECTIONS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")


def write(case: str, folder: Path, model: PreTrainedModel | None = None) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of a kind: where it is, and its weights."""
    model = model or quantised.plain()
    if case not in FOLDERS:
        pytest.importorskip("gguf", reason="gguf is not installed")
        return folder / "model.gguf", quantised.write_gguf(folder / "model.gguf", model, case)
    method, given = FOLDERS[case]
    if method == "gptq":
        settings = quantised.gptq_settings(given["bits"], given.get("version", 1))
        return folder, quantised.write_folder(folder, model, quantised.gptq(**given), settings)
    if method == "awq":
        return folder, quantised.write_folder(folder, model, quantised.awq, quantised.AWQ_SETTINGS)
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    return folder, quantised.write_folder(
        folder, model, quantised.compressed(**given), quantised.compressed_settings(**given)
    )


def kept_in(case: str) -> torch.dtype:
    """The type of the panels: bytes with scales and integers of the file's own bits, or integers of four or eight."""
    if case in BLOCKS and native.takes_blocks() and case not in ("Q2_K", "Q3_K"):
        return torch.uint8
    return torch.int8 if case in EIGHT else torch.int32


def stored(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the linear layers as they are kept."""
    return {f"{name}.weight": m.weight.detach() for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def test_every_type_of_gguf_in_one_file(tmp_path: Path) -> None:
    """Each is what gguf's own code computes; the files of one type are slow to read, and `make real` reads them."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    names = [f"{layer}.{part}_proj.weight" for layer in (0, 1) for part in PROJECTIONS]
    types = dict(zip(names, EXACT, strict=False))
    weights = quantised.write_gguf(tmp_path / "m.gguf", quantised.plain(), "Q4_0", types)
    model, _ = truedraft.load(str(tmp_path / "m.gguf"), "float32")
    found = {type: name for name in weights for end, type in types.items() if name.endswith(end)}
    assert {*found} == {*EXACT}
    for type, name in found.items():
        weight = model.get_parameter(name).data
        assert isinstance(weight, PackedTensor), type
        assert weight.qdata.dtype == kept_in(type), type
        assert torch.equal(weight.dequantize(), weights[name]), type


def test_a_file_of_gguf_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    """In its header, in a list of strings, in a tensor; by what loads it and by what reads its configuration alone."""
    path, _ = write("Q4_0", tmp_path)
    whole = path.read_bytes()
    for there in (1000, len(whole) // 10, len(whole) // 2, len(whole) - 50):
        path.write_bytes(whole[:there])
        for reads in (truedraft.load, sized):
            with pytest.raises(Refused, match=f"MODEL '.*' cannot be loaded: the file is cut short, it has {there:,} "):
                reads(str(path))


@pytest.mark.parametrize(
    "case", [*FOLDERS, *(pytest.param(case, marks=pytest.mark.slow) for case in EXACT[:-1]), EXACT[-1]]
)
def test_weights_are_those_of_the_format(case: str, tmp_path: Path) -> None:
    """Linear layers stay integers of the format's bits, and stand for what its own code computes in fp32."""
    path, weights = write(case, tmp_path)
    model, tokenizer = truedraft.load(str(path), "float32")
    assert (
        model.dtype == torch.float32 and tokenizer("one day").input_ids == load_tokenizer("nano")("one day").input_ids
    )
    kept = stored(model)
    assert len(kept) == 15
    for name, weight in kept.items():
        if name in weights:
            assert isinstance(weight, PackedTensor), name
            assert torch.equal(weight.dequantize(), weights[name]), name
    packed = kept["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(packed, PackedTensor) and packed.qdata.dtype == kept_in(case)
    rest = {**quantised.plain().state_dict(), **weights}
    for name, tensor in model.named_parameters():
        if not isinstance(tensor.data, PackedTensor):
            assert torch.equal(tensor, rest[name]), name


@pytest.mark.parametrize(
    "case", ["gptq-asymmetric", "awq", "w8a16", pytest.param("Q4_0", marks=pytest.mark.slow), "Q6_K"]
)
def test_texts_are_those_of_the_plain_model_with_these_weights(case: str, tmp_path: Path) -> None:
    path, weights = write(case, tmp_path)
    model, _ = truedraft.load(str(path), "float32")
    plain = quantised.with_weights(quantised.plain(), weights)
    fast = truedraft.accelerate(model, control="fixed")
    for sample in (False, True):
        given = dict(**ragged(plain, 5), max_new_tokens=30, do_sample=sample, pad_token_id=0)
        texts = []
        for generate in (plain.generate, model.generate, fast.generate):
            torch.manual_seed(3)
            texts.append(generate(**given))
        assert len(texts[0].unique()) > 50
        assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


@compiled
@pytest.mark.parametrize(
    ("case", "dtype"),  # products of each layout in each dtype: test_kernels.py
    [
        *zip(["gptq", "awq", "int8", "Q4_K"], ["float32"] * 4, strict=True),
        *zip(["gptq-asymmetric", "w4a16", "Q6_K"], ["bfloat16"] * 3, strict=True),
        pytest.param("Q4_0", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_passes_are_compiled_and_have_the_same_bits_at_any_width(case: str, dtype: str, tmp_path: Path) -> None:
    path, _ = write(case, tmp_path)
    model, _ = truedraft.load(str(path), dtype=dtype)
    target = DecoderTarget(model)
    assert target.fallback_reason is None and target.runtime.startswith("compiled pass")
    assert_same_bits(target, seeds=1)


def test_mixed_types_of_one_file(tmp_path: Path) -> None:
    """As in Q4_K_M: most layers in one type, some in another, and what has no groups as plain weights, said once."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    others = {"down_proj.weight": "Q6_K", "v_proj.weight": "F16", "1.mlp.up_proj.weight": "IQ3_S"}
    weights = quantised.write_gguf(tmp_path / "m.gguf", quantised.plain(), "Q4_K", others)
    with pytest.warns(Note, match=r"1 tensor \(model.layers.1.mlp.up_proj.weight\) could not stay integers"):
        model, _ = truedraft.load(str(tmp_path / "m.gguf"), "float32")
    for name, weight in stored(model).items():
        plain = name.endswith(("v_proj.weight", "1.mlp.up_proj.weight"))
        assert isinstance(weight, PackedTensor) != plain, name
        assert torch.equal(weight if plain else weight.dequantize(), weights[name]), name


def test_a_tied_head_stays_integers(tmp_path: Path) -> None:
    path, weights = write("Q8_0", tmp_path, quantised.plain(tied=True))
    model, _ = truedraft.load(str(path), "float32")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert isinstance(head.data, PackedTensor) and (embedding is head) == native.takes_blocks()
    for weight in (embedding if embedding is not head else head.dequantize(), head.dequantize()):
        assert torch.equal(weight, weights["lm_head.weight"])
    plain = quantised.with_weights(quantised.plain(tied=True), weights)
    given = dict(**ragged(plain, 3), max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert torch.equal(truedraft.accelerate(model).generate(**given), plain.generate(**given))


@compiled
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks of memory are read from /proc")
def test_loading_a_file_of_gguf_takes_little_more_memory_than_the_file(tmp_path: Path) -> None:
    """Pages of the file that are mapped into memory are counted too."""
    path, small = tmp_path / "m.gguf", tmp_path / "small"
    small.mkdir()
    quantised.write_gguf(path, quantised.plain.__wrapped__(hidden=1024, layers=3), "Q8_0")
    truedraft.load(str(write("Q8_0", small)[0]))
    gc.collect()
    trim()
    before = resident("VmRSS")
    forget_peak()
    model, _ = truedraft.load(str(path))
    held, size = resident("VmHWM") - before, path.stat().st_size
    assert native.takes_blocks() and model.num_parameters() > 2e7
    assert held < 1.8 * size, f"{held / size:.2f} of the file"


def test_columns_in_the_order_of_activations_are_plain_weights(tmp_path: Path) -> None:
    settings = quantised.gptq_settings(desc_act=True)
    weights = quantised.write_folder(tmp_path, quantised.plain(), quantised.gptq(act_order=True), settings)
    with pytest.warns(Note, match="14 tensors .* could not stay integers"):
        model, _ = truedraft.load(str(tmp_path))
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in weights.items())


def test_experts_are_plain_weights(tmp_path: Path) -> None:
    """The tensors of single experts, quantised, become the matrices in which transformers keeps all of them."""
    sizes = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_attention_heads=4, head_dim=16)
    torch.manual_seed(6)
    config = CONFIG_MAPPING["qwen3_moe"](**{**ARCHITECTURES["qwen3_moe"], **sizes, "vocab_size": 4096})
    mixture = AutoModelForCausalLM.from_config(config).eval()
    weights = quantised.write_folder(tmp_path, mixture, quantised.awq, quantised.AWQ_SETTINGS)
    assert sum(".experts." in name for name in weights) > 10
    model, _ = truedraft.load(str(tmp_path))
    mixture.save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    save_file({**tensors, **weights}, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    assert sum(isinstance(w, PackedTensor) for w in stored(model).values()) >= 8
    given = dict(**ragged(plain, 3), max_new_tokens=20, do_sample=False, pad_token_id=0)
    expected = plain.generate(**given)
    assert torch.equal(model.generate(**given), expected)
    assert torch.equal(truedraft.accelerate(model).generate(**given), expected)


def test_shards_and_settings_are_read(tmp_path: Path) -> None:
    """Shards by their index; bfloat16 stays the type of activations; generation settings are those of the folder."""
    folder, weights = write("gptq", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    homes = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model, _ = truedraft.load(str(folder))
    assert model.dtype == torch.bfloat16 and model.generation_config.eos_token_id == [7, 9]
    assert model.config.name_or_path == str(folder) and not hasattr(model.config, "quantization_config")
    for name, weight in weights.items():
        assert torch.equal(model.get_parameter(name).dequantize(torch.float32), weight)


@pytest.mark.parametrize("factor", [8.0, pytest.param(32.0, marks=pytest.mark.slow), 5.0])
def test_rotary_embeddings_of_llama_3_are_known_by_their_divisors(factor: float, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    model = copy.deepcopy(quantised.plain())
    rotary = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **quantised.LLAMA3}
    model.config.rope_parameters = rotary
    frequencies = type(model.model.rotary_emb)(model.config).inv_freq
    divisors = 500000.0 ** -(torch.arange(16) / 16) / frequencies
    quantised.write_gguf(tmp_path / "m.gguf", model, "Q8_0", divisors=divisors)
    if factor == 5.0:
        with pytest.raises(Refused, match="none of Llama 3 that are known here"):
            truedraft.load(str(tmp_path / "m.gguf"))
    else:
        loaded, _ = truedraft.load(str(tmp_path / "m.gguf"))
        assert torch.equal(loaded.model.rotary_emb.inv_freq, frequencies)


def test_architectures_with_other_matrices_are_read_by_transformers(tmp_path: Path) -> None:
    """GPT-2 has its matrices transposed: plain weights, of the same numbers."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    weights = quantised.write_gpt2(tmp_path / "m.gguf")
    with pytest.warns(Note, match="reads matrices of this architecture into plain weights"):
        model, _ = truedraft.load(str(tmp_path / "m.gguf"))
    found = model.get_parameter("transformer.h.0.mlp.c_fc.weight")
    assert gguf and torch.equal(found, weights["blk.0.ffn_up.weight"].T)


@pytest.mark.parametrize("case", ["awq", "Q4_1"])
def test_command_reads_them(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, weights = write(case, tmp_path)
    _, tokenizer = truedraft.load(str(path))
    prompt = tokenizer("one day", return_tensors="pt")
    plain = quantised.with_weights(quantised.plain(), weights)
    given = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    expected = plain.generate(**given, max_new_tokens=24, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert main(["generate", str(path), "one day", "--max-new-tokens", "24", "--json", "--dtype", "float32"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected.tolist()


@pytest.mark.parametrize("blocks", [True, False])
def test_a_file_of_gguf_gets_the_dtype_that_decodes_fastest(
    blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names none: bfloat16 where products are those of integers, else float32; commands say which."""
    path, _ = write("Q6_K", tmp_path)
    if blocks and not native.takes_blocks():
        pytest.skip("this processor has no products of integers")
    monkeypatch.setattr(native, "takes_blocks", lambda: blocks)
    chosen = torch.bfloat16 if blocks else torch.float32
    assert truedraft.load(str(path))[0].dtype == chosen
    assert truedraft.load(str(path), "float32")[0].dtype == torch.float32
    assert sized(str(path), "auto").dtype == chosen, "`truedraft plan` counts with it"
    assert main(["generate", str(path), "one day", "--max-new-tokens", "4"]) == 0
    note = f"activations in {str(chosen).removeprefix('torch.')}, which decodes fastest here"
    assert note in capsys.readouterr().err
    assert main(["generate", str(path), "one day", "--max-new-tokens", "4", "--dtype", "float32"]) == 0
    assert "decodes fastest" not in capsys.readouterr().err


@compiled
def test_weights_stay_integers_where_avx512_has_no_permutations_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Cascade Lake and Cooper Lake."""
    library: Any = native.library()
    path, weights = write("Q4_K", tmp_path)
    plain = quantised.with_weights(quantised.plain(), weights)
    flags = "GenuineIntel", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"
    for module in (processors, panels, releasing):
        monkeypatch.setattr(module, "processor", lambda: frozenset(flags))
    try:
        if library.truedraft_choose(SETS["AVX512-VNNI"]) != SETS["AVX512-VNNI"]:
            pytest.skip("this processor has no AVX512-VNNI")
        assert native.takes_blocks() and truedraft.load(str(path))[0].dtype == torch.bfloat16
        model, _ = truedraft.load(str(path), "float32")
        assert {weight.qdata.dtype for weight in stored(model).values()} == {torch.uint8}
        fast = truedraft.accelerate(model)
        given = dict(**ragged(plain, 3), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert torch.equal(fast.generate(**given), plain.generate(**given))
        assert fast.report().runtime.startswith("compiled pass")
    finally:
        library.truedraft_choose(native.BEST)


def damaged(**given: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": quantised.scheme(**given)}}


ACTIVATIONS = {"num_bits": 8, "type": "int", "dynamic": True}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gptq", {"bits": 3}, "GPTQ of 3 bits, which is not read here: give one of 2, 4 or 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "GPTQ in the layout 'marlin'"),
        ("awq", {"bits": 8}, "AWQ of 8 bits"),
        ("awq", {"version": "gemv"}, "AWQ in the layout 'gemv', which is not read here: save it as 'gemm'"),
        ("w4a16", {"format": "marlin-24"}, "in the layout 'marlin-24'"),
        ("w4a16", damaged(input_activations=ACTIVATIONS), "with quantised activations"),
        ("w4a16", {"config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOAT}}}, r"8 bits \(float\)"),
        ("w4a16", damaged(strategy="block"), "with scales by block"),
        ("w4a16", {"config_groups": {"FP8": ["Linear"]}}, "with the scheme FP8"),
        ("w4a16", {"kv_cache_scheme": ACTIVATIONS}, "with a quantised cache"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparse weights"),
        ("w4a16", {"transform_config": {"config_groups": {"r": {}}}}, "with transformed activations"),
    ],
)
def test_unsupported_settings_are_refused(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = write(case, tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=message):
        truedraft.load(str(path))
    assert main(["generate", str(path), "one day"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    path, _ = write("gptq", tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.qzeros"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(Refused, match=r"lacks model\.layers\.0\.mlp.up_proj\.qzeros"):
        truedraft.load(str(path))
    (path / "model.safetensors").unlink()
    with pytest.raises(Refused, match=r"has no model\.safetensors"):
        truedraft.load(str(path))
    pytest.importorskip("gguf", reason="gguf is not installed")
    (tmp_path / "m.gguf").write_bytes(b"no tensors")
    with pytest.raises(Refused, match="cannot be loaded"):
        truedraft.load(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("stretching", ["yarn", pytest.param("linear", marks=pytest.mark.slow)])
def test_rotary_embeddings_that_transformers_does_not_read_are_refused(stretching: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    quantised.write_gguf(tmp_path / "m.gguf", quantised.plain(), "Q8_0", llama__rope__scaling__type=stretching)
    with pytest.raises(Refused, match=f"does not read its rotary embeddings \\({stretching}\\)"):
        truedraft.load(str(tmp_path / "m.gguf"))


def test_a_missing_package_and_a_second_quantisation_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write("gptq", tmp_path)
    with pytest.raises(Refused, match="quantised already"):
        truedraft.load(str(path), quantize="int8")
    (tmp_path / "m.gguf").touch()
    monkeypatch.setattr(checkpoints, "find_spec", lambda package: None)
    for file in (path, tmp_path / "m.gguf"):
        with pytest.raises(Refused, match=r"pip install 'truedraft\[quantize\]'"):
            truedraft.load(str(file))


def test_the_plan_of_a_server_counts_the_bytes_of_the_files(tmp_path: Path) -> None:
    path, _ = write("gptq", tmp_path)
    (weights,) = (part for part in planned(ServeConfig(model=str(path))).parts if part.name == "weights")
    assert weights.bytes == (path / "model.safetensors").stat().st_size
