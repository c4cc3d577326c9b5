"""Loading by name: dtypes of torch, adapters without a model, and generation configs that search with beams."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

import seq2seq_models
import truedraft
from models import tiny
from served import generated, running
from truedraft import Refused, assets
from truedraft.cli import main
from truedraft.errors import Note
from truedraft.loading import load, load_tokenizer
from truedraft.planning.models import sized

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Could not find a config")  # of PEFT


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", torch.float32, torch.half])
def test_dtypes_of_torch(dtype: Any) -> None:
    model, _ = truedraft.load("nano", dtype=dtype)
    assert model.dtype == (dtype if isinstance(dtype, torch.dtype) else torch.bfloat16)


def test_a_path_is_a_name() -> None:
    model, _ = truedraft.load(assets.path("nano"), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    with pytest.raises(Refused, match="does not exist"):
        truedraft.load(Path("/no/such/folder"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, None, "half"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    named = str(dtype).removeprefix("torch.")
    with pytest.raises(Refused, match=f"dtype {named}: choose one of auto, float32, bfloat16, float16"):
        truedraft.load("nano", dtype=dtype)


# ---------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def peft() -> Any:
    return pytest.importorskip("peft", reason="peft is not installed")


def adapted(peft: Any, base: str, kind: str = "lora") -> Any:
    """A model with an adapter whose weights are random."""
    model, _ = load(base, dtype="float32")
    torch.manual_seed(1)
    names = ["q_proj", "v_proj", "up_proj"]
    configs = {
        "lora": lambda: peft.LoraConfig(r=4, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM"),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=names, use_dora=True, task_type="CAUSAL_LM"),
        "ia3": lambda: peft.IA3Config(target_modules=names, feedforward_modules=["up_proj"], task_type="CAUSAL_LM"),
        "prompts": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    }
    whole = peft.get_peft_model(model, configs[kind]()).eval()
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            if weight.requires_grad and "magnitude" not in name:
                weight.add_(0.1 * torch.randn_like(weight))
    return whole


def saved(whole: Any, folder: Path, base: str) -> Path:
    """An adapter alone, as PEFT saves it, that names its model."""
    whole.peft_config["default"].base_model_name_or_path = base
    whole.save_pretrained(folder)
    assert not (folder / "config.json").exists()
    return folder


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_an_adapter_is_loaded_with_the_model_that_it_names(kind: str, peft: Any, tmp_path: Path) -> None:
    base = str(assets.path("nano"))
    whole = adapted(peft, base, kind)
    folder = saved(whole, tmp_path / "adapter", base)
    model, tokenizer = truedraft.load(str(folder), dtype=torch.float32)
    given = dict(tokenizer("one day", return_tensors="pt", return_token_type_ids=False))
    expected = whole.generate(**given, max_new_tokens=30, do_sample=False)
    plain = load(base, "float32")[0].generate(**given, max_new_tokens=30, do_sample=False)  # type: ignore[operator]
    assert not torch.equal(plain, expected)
    fast = truedraft.accelerate(model, tokenizer)
    assert torch.equal(fast.generate(**given, max_new_tokens=30, do_sample=False), expected)
    assert not any("lora" in name for name, _ in model.named_modules())


def test_the_base_beside_the_adapter_and_the_command(
    peft: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative name is one from the adapter's folder on; the adapter's own tokenizer and settings are kept."""
    model, tokenizer = load("nano")
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    whole = adapted(peft, str(tmp_path / "base"))
    folder = saved(whole, tmp_path / "adapter", "../base")
    own = copy.deepcopy(tokenizer)
    own.chat_template = "its own"
    own.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7], "top_k": 3}))
    loaded, found = truedraft.load(f"{folder}@cpu", dtype=torch.float32)
    assert found.chat_template == "its own" and loaded.generation_config.eos_token_id == [0, 7]
    assert load_tokenizer(str(folder)).chat_template == "its own"
    given = dict(tokenizer("one day", return_tensors="pt", return_token_type_ids=False))
    expected = whole.generate(**given, max_new_tokens=20, do_sample=False, eos_token_id=[0, 7])
    assert main(["generate", str(folder), "one day", "--max-new-tokens", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected[0, given["input_ids"].shape[1] :].tolist()
    assert sized(str(folder)).weights == sized(str(tmp_path / "base")).weights


def test_an_adapter_is_quantised_with_its_model(peft: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchao.utils", reason="torchao is not installed")
    folder = saved(adapted(peft, "nano"), tmp_path, str(assets.path("nano")))
    model, tokenizer = truedraft.load(str(folder), quantize="int8")
    given = dict(tokenizer("one day", return_tensors="pt", return_token_type_ids=False))
    fast = truedraft.accelerate(model, tokenizer)
    expected = model.generate(**given, max_new_tokens=20, do_sample=False)  # type: ignore[operator]
    assert torch.equal(fast.generate(**given, max_new_tokens=20, do_sample=False), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_model_name_or_path": "/no/such"}, "its base model '/no/such' does not exist"),
        ({"base_model_name_or_path": None}, "names no model: set base_model_name_or_path"),
        ({"base_model_name_or_path": "../adapter"}, "names itself"),
        ("{", "adapter_config.json is no JSON object"),
        ("[1]", "adapter_config.json is no JSON object"),
    ],
    ids=str,
)
def test_adapters_without_a_model_are_refused(config: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(Refused, match=message) as error:
        truedraft.load(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_adapters_that_cannot_be_loaded_are_refused(peft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(assets.path("nano"))
    folder = saved(adapted(peft, base, "prompts"), tmp_path / "prompts", base)
    with pytest.raises(Refused, match="PROMPT_TUNING, which puts learnt vectors before every prompt"):
        truedraft.load(str(folder))
    folder = saved(adapted(peft, base), tmp_path / "damaged", base)
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(Refused, match="damaged' cannot be loaded: "):
        truedraft.load(str(folder))
    from truedraft.runtime.checkpoints import adapters

    monkeypatch.setattr(adapters, "find_spec", lambda package: None)
    with pytest.raises(Refused, match="is an adapter of PEFT, which is not installed: pip install peft"):
        truedraft.load(str(folder))


# ---------------------------------------------------------------- beams


def models_with_beams() -> dict[str, Any]:
    found = {"an encoder-decoder": copy.deepcopy(seq2seq_models.model()), "a decoder": copy.deepcopy(tiny())}
    for model in found.values():
        model.generation_config.num_beams = 4
    return found


@pytest.mark.parametrize("kind", ["an encoder-decoder", "a decoder"])
def test_beams_of_a_generation_config_are_said_once_with_the_line_that_ends_them(kind: str) -> None:
    model = models_with_beams()[kind]
    with pytest.warns(Note, match=r"num_beams=4.*model\.generation_config\.num_beams = 1 sets greedy search") as said:
        fast = truedraft.accelerate(model)
    assert len(said) == 1
    ids = torch.tensor([[5, 6, 7]])
    line = "model.generation_config.num_beams = 1"
    with pytest.raises(Refused, match="num_beams=4: beam search is not supported; num_beams=1 searches greedily"):
        fast.generate(ids, max_new_tokens=9)
    expected = model.generate(ids, max_new_tokens=9, num_beams=1, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=9, num_beams=1, do_sample=False), expected)
    exec(line, {"model": model})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = truedraft.accelerate(model)
        assert torch.equal(fast.generate(ids, max_new_tokens=9, do_sample=False), expected)


@pytest.mark.filterwarnings("ignore:.*num_beams=4")
def test_a_server_decodes_greedily_where_the_checkpoint_has_beams() -> None:
    """Its requests have no parameter for them."""
    model, tokenizer = load("nano")
    model.generation_config.num_beams = 4
    fast = truedraft.accelerate(model, tokenizer)
    given = dict(max_new_tokens=20, do_sample=False, num_beams=1)
    (expected,) = generated(fast, "one day", **given)
    with running(fast) as server:
        body = json.dumps({"prompt": "one day", "max_tokens": 20, "temperature": 0}).encode()
        request = Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
        answer = json.loads(urlopen(request, timeout=60).read())
    assert answer["choices"][0]["text"] == tokenizer.decode(expected, skip_special_tokens=True)
