"""An accelerated model in its model's place: pipelines, scripts, wrappers around the model, copies and displays."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, TextIteratorStreamer, pipeline

import seq2seq_models
import truedraft
from drafters_for_tests import Noise
from models import ragged, sibling, tiny
from truedraft import Refused
from truedraft.loading import load

IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
GREEDY: dict[str, Any] = dict(max_new_tokens=16, do_sample=False)
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def nano() -> tuple[Any, Any]:
    model, tokenizer = load("nano")
    tokenizer.chat_template, tokenizer.padding_side = TEMPLATE, "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


@pytest.fixture
def own() -> PreTrainedModel:
    """A model that a test may change."""
    return copy.deepcopy(tiny(dtype=torch.float32))


@pytest.fixture
def fast(own: PreTrainedModel) -> truedraft.Accelerated:
    return truedraft.accelerate(own, draft="suffix", control="fixed")


PROMPTS: dict[str, Any] = {
    "text": "one day, a girl",
    "batch": ["one day, a girl", "the cat", "she saw a red ball and a red"],
    "chat": [{"role": "user", "content": "one day"}],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "new": {"do_sample": False, "return_full_text": False},
    "tensors": {"do_sample": False, "return_tensors": True},
    "stop": {"do_sample": False, "stop_sequence": "the"},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("prompts", PROMPTS)
def test_pipelines_accept_an_accelerated_model(
    prompts: str, settings: str, nano: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = nano
    fast = truedraft.accelerate(model, tokenizer)
    outputs = []
    for kind in (model, fast):
        with caplog.at_level(logging.ERROR):
            pipe = pipeline("text-generation", model=kind, tokenizer=tokenizer)
        torch.manual_seed(3)
        many = {"batch_size": 3} if prompts == "batch" else {}
        given = copy.deepcopy(PROMPTS[prompts])
        outputs.append(pipe(given, max_new_tokens=8, **SETTINGS[settings], **many))
    assert outputs[0] == outputs[1]
    assert fast.report().tokens > 0 and not caplog.records


def test_attributes_and_methods_of_a_model(own: Any, fast: Any) -> None:
    for name in ("device", "dtype", "config", "generation_config", "training", "name_or_path", "lm_head"):
        assert getattr(fast, name) is getattr(own, name) or getattr(fast, name) == getattr(own, name)
    assert fast.num_parameters() == own.num_parameters() and fast.can_generate()
    assert fast.get_input_embeddings() is own.get_input_embeddings()
    assert fast.state_dict().keys() == own.state_dict().keys()
    assert isinstance(fast, PreTrainedModel) and isinstance(fast, truedraft.Accelerated)
    assert fast.__class__.__name__ == type(own).__name__ and type(fast) is truedraft.Accelerated
    assert inspect.signature(fast.forward) == inspect.signature(own.forward)
    assert {"generation_config", "compute_transition_scores", "report"} <= set(dir(fast))
    assert torch.equal(fast(IDS).logits, own(IDS).logits) and torch.equal(fast.forward(IDS).logits, own(IDS).logits)
    assert fast(input_ids=IDS, labels=IDS).loss == own(input_ids=IDS, labels=IDS).loss
    assert GenerationConfig.from_model_config(fast.config) == GenerationConfig.from_model_config(own.config)
    with pytest.raises(AttributeError, match="no_such_thing"):
        fast.no_such_thing  # noqa: B018
    assert not hasattr(fast, "_repr_html_")


def test_transition_scores_equal_the_model(own: Any, fast: Any) -> None:
    kwargs: dict[str, Any] = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    mine, theirs = fast.generate(IDS, **kwargs), own.generate(IDS, **kwargs)
    scores = fast.compute_transition_scores(mine.sequences, mine.scores, normalize_logits=True)
    expected = own.compute_transition_scores(theirs.sequences, theirs.scores, normalize_logits=True)
    assert torch.allclose(scores, expected, atol=1e-4)


def test_streamer_in_a_thread(nano: Any) -> None:
    model, tokenizer = nano
    fast = truedraft.accelerate(model, tokenizer)
    inputs = tokenizer("one day, a girl", return_tensors="pt").to(fast.device)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    thread = threading.Thread(target=fast.generate, kwargs={**inputs, **GREEDY, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    new = model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :]
    assert text == tokenizer.decode(new)


def test_attributes_are_set_on_the_model(own: Any, fast: Any) -> None:
    fast.generation_config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert own.generation_config.max_new_tokens == 5
    assert torch.equal(fast.generate(IDS), own.generate(IDS)) and fast.generate(IDS).shape == (1, 12)
    fast.config.pad_token_id = 3
    fast.generation_config.eos_token_id = int(fast.generate(IDS)[0, 9])
    assert own.config.pad_token_id == 3 and torch.equal(fast.generate(IDS), own.generate(IDS))
    assert fast.generate(IDS).shape[1] < 12
    with pytest.raises(Refused, match="did you mean 'drafter'"):
        fast.drafer = "suffix"
    with pytest.raises(Refused, match="generation_confg: neither LlamaForCausalLM"):
        fast.generation_confg = GenerationConfig()
    with pytest.raises(Refused, match="model cannot be replaced"):
        fast.model = tiny()
    fast.tokenizer = "mine"
    assert fast.tokenizer == "mine" and not hasattr(own, "tokenizer")


def test_modes_moves_and_casts_act_on_the_model(own: Any, fast: Any) -> None:
    assert fast.train() is fast and own.training
    with pytest.raises(Refused, match="training mode"):
        fast.generate(IDS, **GREEDY)
    assert fast.eval() is fast and not own.training
    assert fast.to("cpu") is fast is fast.requires_grad_(False)
    before = fast.target
    assert torch.equal(fast.generate(IDS, **GREEDY), own.generate(IDS, **GREEDY)) and fast.target is before
    assert fast.double() is fast and fast.dtype == own.dtype == torch.float64
    assert torch.equal(fast.generate(IDS, **GREEDY), own.generate(IDS, **GREEDY))
    assert fast.target is not before and "float64" in repr(fast)


def test_cast_binds_a_draft_model_again(own: Any) -> None:
    fast = truedraft.accelerate(own, draft=sibling(tiny(dtype=torch.float32)), control="fixed")
    fast.to(torch.float64)
    assert torch.equal(fast.generate(IDS, **GREEDY), own.generate(IDS, **GREEDY))


def test_accelerated_model_in_a_module_and_in_another_call(own: Any, fast: Any) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = fast

    wrapper = Wrapper().eval()
    assert torch.equal(wrapper.lm.generate(IDS, **GREEDY), own.generate(IDS, **GREEDY))
    assert {name.removeprefix("lm.") for name in wrapper.state_dict()} == set(own.state_dict())
    assert truedraft.accelerate(fast, draft=None).model is own
    other = truedraft.accelerate(copy.deepcopy(own), draft=fast, control="fixed")
    assert torch.equal(other.generate(IDS, **GREEDY), own.generate(IDS, **GREEDY))
    assert torch.equal(other.generate(IDS, **GREEDY, assistant_model=fast), own.generate(IDS, **GREEDY))
    assert other.report().drafter == "draft-model" and other.report().mean_acceptance_length > 1.5


def test_model_is_unwrapped_from_torch_compile(own: Any) -> None:
    compiled = torch.compile(own)
    fast = truedraft.accelerate(compiled)  # type: ignore[arg-type]
    assert fast.model is own
    assert torch.equal(fast.generate(IDS, **GREEDY), own.generate(IDS, **GREEDY))
    own.forward = torch.compile(own.forward)
    with pytest.raises(Refused, match=r"del model\.forward"):
        truedraft.accelerate(compiled)  # type: ignore[arg-type]
    del own.forward
    own.compile()
    with pytest.raises(Refused, match="_compiled_call_impl = None"):
        truedraft.accelerate(own)


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="adapters need peft, which is not installed")


def adapted(peft: Any, model: PreTrainedModel, **kwargs: Any) -> Any:
    """LoRA with large random weights."""
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **kwargs)).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return found


# peft imports deprecated names of transformers
PEFT = pytest.mark.filterwarnings("ignore::FutureWarning")


@PEFT
def test_adapters_of_layers_are_applied(peft: Any, own: Any) -> None:
    plain = own.generate(IDS, **GREEDY)
    model = adapted(peft, own, task_type="CAUSAL_LM")
    inputs = ragged(own, 2)
    fast = truedraft.accelerate(model, draft="suffix", control="fixed")
    assert fast.model is model.get_base_model()
    for given in ({"inputs": IDS}, inputs):
        assert torch.equal(fast.generate(**given, **GREEDY), model.generate(**given, **GREEDY))
    assert not torch.equal(fast.generate(IDS, **GREEDY), plain)
    with model.disable_adapter():
        assert torch.equal(fast.generate(IDS, **GREEDY), plain)
    model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=False)
    assert torch.equal(truedraft.accelerate(model, draft=None).generate(IDS), model.generate(IDS))
    model.merge_adapter()
    assert torch.equal(fast.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    assert torch.equal(truedraft.accelerate(merged).generate(IDS, **GREEDY), merged.generate(IDS, **GREEDY))


@PEFT
def test_adapted_model_compiled_and_as_drafter(peft: Any, own: Any) -> None:
    model = adapted(peft, own)
    assert truedraft.accelerate(torch.compile(model)).model is model.get_base_model()  # type: ignore[arg-type]
    fast = truedraft.accelerate(tiny(dtype=torch.float32), draft=model, control="fixed")
    assert torch.equal(fast.generate(IDS, **GREEDY), fast.model.generate(IDS, **GREEDY))
    assert fast.report().drafter == "draft-model"


@PEFT
def test_adapters_outside_layers_are_refused(peft: Any, own: Any) -> None:
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(Refused, match="PROMPT_TUNING, which puts learnt vectors before every prompt"):
        truedraft.accelerate(peft.get_peft_model(copy.deepcopy(own), prompts).eval())
    activated = adapted(peft, own, task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    with pytest.raises(Refused, match="activated LoRA, which is computed from each call as a whole"):
        truedraft.accelerate(activated)


DRAFTS: dict[str, Any] = {
    "auto": lambda: "auto",
    "merged": lambda: "suffix+token-recycling",
    "model": lambda: sibling(tiny(dtype=torch.float32)),
    "object": lambda: Noise(size=5),
    "none": lambda: None,
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_deep_copy_is_independent(draft: str, own: Any) -> None:
    fast = truedraft.accelerate(own, draft=DRAFTS[draft](), control="fixed", runtime="stock")
    expected = fast.generate(IDS, **GREEDY)
    twin = copy.deepcopy(fast)
    assert type(twin) is type(fast) and twin.model is not own and twin.drafter is not fast.drafter
    assert torch.equal(twin.generate(IDS, **GREEDY), expected)
    assert twin.report().drafter == fast.report().drafter and twin.report().runtime == fast.report().runtime
    with torch.no_grad():
        twin.get_output_embeddings().weight.mul_(-1)
    assert torch.equal(twin.generate(IDS, **GREEDY), twin.model.generate(IDS, **GREEDY))
    assert torch.equal(fast.generate(IDS, **GREEDY), expected) and not torch.equal(
        twin.generate(IDS, **GREEDY), expected
    )


def test_pickle_and_shallow_copy_are_refused(fast: Any) -> None:
    for refused in (pickle.dumps, copy.copy):
        with pytest.raises(Refused, match=r"save \.model, and accelerate"):
            refused(fast)
    assert pickle.loads(pickle.dumps(fast.model)).num_parameters() == fast.num_parameters()

    class Odd(Noise):
        pass

    class Bare(truedraft.Drafter):
        card, width = Noise.card, 1

        def propose(self, rows: Any, budget: Any) -> Any:
            return [truedraft.DraftTree.chain(row.tokens[-1]) for row in rows]

    assert copy.deepcopy(truedraft.accelerate(tiny(), draft=Odd())).drafter.size == 7
    with pytest.raises(Refused, match="a new Bare cannot be made"):
        copy.deepcopy(truedraft.accelerate(tiny(), draft=Bare()))


def test_repr_names_the_methods(fast: Any) -> None:
    text = repr(fast)
    for part in ("LlamaForCausalLM", f"{fast.num_parameters():,} parameters", "float32 on cpu", "drafter suffix",
                 "rule greedy, or seeded", "control fixed", fast.target.runtime):  # fmt: skip
        assert part in text
    assert "\n" not in text

    class Printer:
        def text(self, text: str) -> None:
            self.shown = text

    fast.generate(IDS, **GREEDY)
    printer = Printer()
    fast.report()._repr_pretty_(printer, False)
    assert printer.shown == str(fast.report()) and "mean acceptance length" in printer.shown


def test_accelerated_encoder_decoder_in_its_models_place() -> None:
    model, tokenizer = copy.deepcopy(seq2seq_models.model()), seq2seq_models.tokenizer()
    fast = truedraft.accelerate(model, tokenizer)
    inputs = tokenizer(seq2seq_models.TEXTS, return_tensors="pt", padding=True).to(fast.device)
    inputs.pop("token_type_ids", None)
    assert fast.get_encoder() is model.get_encoder() and fast.config.is_encoder_decoder
    assert torch.equal(fast.eval().generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))
    assert torch.equal(
        fast(**inputs, labels=inputs["input_ids"]).loss, model(**inputs, labels=inputs["input_ids"]).loss
    )


def test_report_is_that_of_the_last_call(fast: Any) -> None:
    fast.generate(IDS, **GREEDY)
    with pytest.raises(ValueError, match="temperature"):
        fast.generate(IDS, do_sample=True, temperature=0.0)
    with pytest.raises(Refused, match="nothing to report"):
        fast.report()


@pytest.fixture(autouse=True)
def _reset_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()
