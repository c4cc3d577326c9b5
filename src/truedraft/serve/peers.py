"""Parameters that clients of other servers send: vLLM's older ones, and those of SGLang, llama.cpp, Ollama and others.

`SPELLED` are other names of parameters that this server has. `ABSENT` are parameters that it lacks: at their neutral
values they ask for nothing and are accepted, any other value is refused with the remedy. The names are those of the
servers' own documentation: vLLM, "OpenAI-compatible server"; SGLang, "Sampling parameters"; llama.cpp, tools/server;
Ollama, "OpenAI compatibility"; OpenRouter, "Reasoning tokens".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from truedraft.serve.errors import ApiError

MOST_KEYS = 256  # names in an object of parameters that are checked one by one
SPELLED = {
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_json_object": "structured_outputs.json_object",
    "guided_regex": "structured_outputs.regex",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "json_schema": "structured_outputs.json",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "random_seed": "seed",
    "regex": "structured_outputs.regex",
    "structural_tag": "structured_outputs.structural_tag",
}  # a name of other servers -> the parameter here, with the member of structured_outputs

REASONING = ("reasoning", "think", "thinking")  # other forms of reasoning_effort and enable_thinking


class Absent(NamedTuple):
    """A parameter that this server lacks.

    neutral: values that ask for nothing, as null, and empty texts, lists and objects do in any case.
    remedy: the reason why others are refused, and what to do.
    of: parameters without which any value of this one asks for nothing.
    """

    neutral: tuple[Any, ...]
    remedy: str
    of: tuple[str, ...] = ()

    def asks(self, value: Any, given: Mapping[str, Any]) -> bool:
        """Whether a value asks for something. given: the request's parameters."""
        if value is None or value in ("", [], {}):
            return False
        if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self.neutral):
            return False
        return not self.of or any(not _is_zero(given.get(name)) for name in self.of)


BEAMS = "this server has no beam search: leave it out"
SAMPLER = "this server does not sample by it: leave it out, and use temperature, top_p, top_k or min_p"
WINDOW = "penalties count the whole output here: leave it out"
APART = "reasoning is returned as reasoning_content, apart from the answer: leave it out"
DIVIDED = "this server does not divide requests between machines: leave it out"
EXTENSION = "this server has no such extensions: leave it out"
MEDIA = "this model reads text: leave it out"
FIGURES = "the figures of a request are in its response's truedraft: leave it out"
PRIVATE = "prefixes are shared within a namespace: give the requests API keys of different namespaces"
PENALTIES = ("frequency_penalty", "presence_penalty")

ABSENT = {
    "adapter_id": Absent((), "adapters are merged into the model that is served: leave it out"),
    "allowed_token_ids": Absent((), "use structured_outputs, or logit_bias"),
    "bootstrap_host": Absent((), DIVIDED),
    "bootstrap_port": Absent((), DIVIDED),
    "bootstrap_room": Absent((), DIVIDED),
    "cache_salt": Absent((), PRIVATE),
    "chat_template": Absent((), "the template is the server's (--chat-template); give values by chat_template_kwargs"),
    "custom_logit_processor": Absent((), EXTENSION),
    "custom_params": Absent((), EXTENSION),
    "data_parallel_rank": Absent((), DIVIDED),
    "details": Absent((False,), FIGURES),
    "detokenize": Absent((True,), "answers are text; use return_tokens for token ids too"),
    "disagg_prefill_dp_rank": Absent((), DIVIDED),
    "dry_allowed_length": Absent((), SAMPLER, ("dry_multiplier",)),
    "dry_base": Absent((), SAMPLER, ("dry_multiplier",)),
    "dry_multiplier": Absent((0,), SAMPLER),
    "dry_penalty_last_n": Absent((), SAMPLER, ("dry_multiplier",)),
    "dry_sequence_breakers": Absent((), SAMPLER, ("dry_multiplier",)),
    "dynatemp_exponent": Absent((), SAMPLER, ("dynatemp_range",)),
    "dynatemp_range": Absent((0,), SAMPLER),
    "early_stopping": Absent((False,), BEAMS),
    "extra_args": Absent((), EXTENSION),
    "extra_key": Absent((), PRIVATE),
    "format": Absent((), "use response_format"),
    "grammar_lazy": Absent((False,), "a grammar holds from the first token on: leave it out"),
    "grammar_triggers": Absent((), "a grammar holds from the first token on: leave it out"),
    "images": Absent((), MEDIA),
    "include_reasoning": Absent((True,), APART),
    "kv_transfer_params": Absent((), DIVIDED),
    "length_penalty": Absent((1.0,), BEAMS),
    "logits_processors": Absent((), EXTENSION),
    "lora": Absent((), "adapters are merged into the model that is served: leave it out"),
    "lora_path": Absent((), "adapters are merged into the model that is served: leave it out"),
    "media_io_kwargs": Absent((), MEDIA),
    "min_keep": Absent((0,), SAMPLER),
    "mirostat": Absent((0,), SAMPLER),
    "mirostat_eta": Absent((), SAMPLER, ("mirostat",)),
    "mirostat_tau": Absent((), SAMPLER, ("mirostat",)),
    "mm_processor_kwargs": Absent((), MEDIA),
    "n_indent": Absent((0,), "use structured_outputs with a grammar"),
    "n_probs": Absent((0,), "use logprobs"),
    "no_stop_trim": Absent((False,), "use include_stop_str_in_output"),
    "options": Absent((), "give its members as parameters, as temperature and top_k; num_predict is max_tokens"),
    "parse_tool_calls": Absent((True,), "use tool_choice='none' for calls as text"),
    "penalize_nl": Absent((), "penalties are for all tokens alike: leave it out", PENALTIES),
    "post_sampling_probs": Absent((False,), "log-probabilities are those before processors: leave it out"),
    "priority": Absent((0,), "namespaces take turns, without priorities: leave it out"),
    "prompt_embeds": Absent((), "give prompt as text or token ids"),
    "raw": Absent((False,), "use /v1/completions for a prompt without a template"),
    "reasoning_format": Absent(("auto", "deepseek"), APART),
    "repeat_last_n": Absent((-1,), WINDOW, PENALTIES),
    "repeat_penalty": Absent((1.0,), "use repetition_penalty, which is for all tokens of prompt and output"),
    "repetition_detection": Absent((), "use max_tokens or deadline"),
    "response_fields": Absent((), "responses have all fields: leave it out"),
    "return_cached_tokens_details": Absent((False,), "usage has the number of cached tokens: leave it out"),
    "return_full_text": Absent((False,), "use echo"),
    "return_hidden_states": Absent((False,), "hidden states are not returned: leave it out"),
    "return_progress": Absent((False,), FIGURES),
    "return_routed_experts": Absent((False,), "routing is not returned: leave it out"),
    "return_token_ids": Absent((False,), "use return_tokens"),
    "return_tokens_as_token_ids": Absent((False,), "use return_tokens"),
    "routed_dp_rank": Absent((), DIVIDED),
    "safe_prompt": Absent((False,), "write a system message"),
    "samplers": Absent((), "processors run in the order of transformers: leave it out"),
    "separate_reasoning": Absent((True,), APART),
    "session_params": Absent((), "send the whole conversation: what it shares with earlier ones is not computed again"),
    "spaces_between_special_tokens": Absent((True,), "special tokens are joined as the tokenizer does: leave it out"),
    "stop_regex": Absent((), "use stop, or structured_outputs.regex"),
    "stream_reasoning": Absent((True,), APART),
    "t_max_predict_ms": Absent((0, -1), "use deadline, in seconds"),
    "tfs_z": Absent((1.0,), SAMPLER),
    "thinking_budget": Absent((-1,), "use max_tokens, which counts reasoning too"),
    "thinking_forced_open": Absent((False,), "the template begins an answer: leave it out"),
    "thinking_token_budget": Absent((-1,), "use max_tokens, which counts reasoning too"),
    "timings_per_token": Absent((False,), FIGURES),
    "top_a": Absent((0,), SAMPLER),
    "top_n_sigma": Absent((-1, 0), SAMPLER),
    "truncate": Absent((), "prompts are read whole: shorten the prompt"),
    "truncate_prompt_tokens": Absent((-1,), "prompts are read whole: shorten the prompt"),
    "typical_p": Absent((1.0,), SAMPLER),
    "use_beam_search": Absent((False,), BEAMS),
    "vllm_xargs": Absent((), EXTENSION),
    "watermark": Absent((False,), "answers have no watermark: leave it out"),
    "xtc_probability": Absent((0,), SAMPLER),
    "xtc_threshold": Absent((), SAMPLER, ("xtc_probability",)),
}
ABSENT_IN_CHAT = {
    "add_special_tokens": Absent((False,), "the chat template writes them: leave it out"),
    "best_of": Absent((1,), "use n: this server returns all that it generates"),
    "echo": Absent((False,), "use continue_final_message, and put the message before the answer"),
}


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request under their names here.

    Raises:
        ApiError: one is given by two names, with different values, or in a form that is not understood.
    """
    inner = given.get("extra_body")  # OpenAI's client sends its members in the body itself
    check_count(len(given))
    flat = [(name, value) for name, value in given.items() if not (name == "extra_body" and isinstance(value, dict))]
    flat += inner.items() if isinstance(inner, dict) else ()
    check_count(len(flat))
    own = [(name, (name, ""), value) for name, value in flat if name not in SPELLED and name not in REASONING]
    others = [(name, _member(target), meant) for name, value in flat for target, meant in _meant(name, value)]
    found: dict[str, Any] = {}
    names: dict[str, str] = {}  # parameter -> the name by which it is given
    for name, (parameter, member), value in (*own, *others):
        if value is None:
            continue
        whole, key = (found.setdefault(parameter, {}), member) if member else (found, parameter)
        if not isinstance(whole, dict) or whole.get(key) not in (None, value):
            first = names.get(parameter, parameter)
            raise ApiError(400, f"{first} and {name} are one parameter, and differ: give one of them", name)
        found[parameter] = {**whole, key: value} if member else value
        names.setdefault(parameter, name)
    return found


def check_count(names: int) -> None:
    """Raises ApiError for more names than are checked one by one."""
    if names > MOST_KEYS:
        raise ApiError(400, f"an object has {names} names: leave out what is no parameter", code="invalid_value")


def _member(target: str) -> tuple[str, str]:
    """A parameter, and its member, "" for all of it."""
    parameter, _, member = target.partition(".")
    return parameter, member


def spelled(given: Mapping[str, Any]) -> dict[str, str]:
    """Parameters, as the server names them -> the name by which a request gives them, where that is another."""
    meant = {target: name for name, value in given.items() for target, _ in _meant(name, None)}
    asked = next((name for name in REASONING if given.get(name) is not None), None)
    return meant | (dict.fromkeys(("reasoning_effort", "enable_thinking"), asked) if asked else {})


def asks_nothing(name: str, value: Any, given: Mapping[str, Any], chat: bool) -> bool:
    """Whether a name is that of a parameter which this server lacks, at a value that asks for nothing.

    Raises:
        ApiError: it asks for something.
    """
    absent = ABSENT.get(name) or (ABSENT_IN_CHAT.get(name) if chat else None)
    if absent is not None and absent.asks(value, given):
        text = f"{name}={value!r:.80} is not supported: {absent.remedy}"
        raise ApiError(400, text, name, "unsupported_parameter")
    return absent is not None


def _meant(name: str, value: Any) -> list[tuple[str, Any]]:
    """The parameter that another name means, and its value; nothing for names of this server."""
    if name in SPELLED:
        return [(SPELLED[name], None if value == "" else value)]
    if name not in REASONING or value is None:
        return []
    if isinstance(value, bool):
        return [("enable_thinking", value)]
    if isinstance(value, str):
        return [("reasoning_effort", value)]
    if isinstance(value, dict):
        return _of_object(name, value)
    raise ApiError(400, f"{name}={value!r:.80} is not understood: use reasoning_effort", name, "invalid_value")


def _of_object(name: str, value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What objects such as `{"type": "disabled"}` and `{"effort": "low"}` ask for."""
    found: list[tuple[str, Any]] = []
    for key, given in value.items():
        if key == "effort":
            found.append(("reasoning_effort", given))
        elif key == "enabled":
            found.append(("enable_thinking", given))
        elif key == "type" and given in ("enabled", "disabled"):
            found.append(("enable_thinking", given == "enabled"))
        elif given is not None and given is not False:
            raise ApiError(
                400, f"{name}.{key}={given!r:.80} is not supported: leave it out, and use reasoning_effort",
                f"{name}.{key}", "unsupported_parameter",
            )  # fmt: skip
    return found


def _is_zero(value: Any) -> bool:
    """Whether a penalty or a strength asks for nothing."""
    return value is None or value == 0
