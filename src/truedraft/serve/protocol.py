"""Bodies of requests, as in OpenAI's API reference, with vLLM's names for what goes beyond it, and our own additions.

`REFUSED` lists the parameters of OpenAI's schema that are refused, with the remedy, and `NO_EFFECT` those, of other
servers too, that change nothing by their definition; other names of other servers are in `peers`. Every other parameter
is honoured, or unknown and refused. A null is as good as a parameter that is left out.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, StringConstraints, model_validator

from truedraft.serve.errors import ApiError
from truedraft.serve.peers import asks_nothing, check_count, translated

T = TypeVar("T")
LONGEST_NAME = 256
MOST_BIASES = 1 << 16  # entries of logit_bias that are checked one by one
SEEDS = 2**64
RANDOM = -1  # as seed: one is drawn, as in vLLM
UNSUPPORTED = "unsupported_parameter"
TAGS = "texts between tags are not constrained: use tools with tool_choice, or a grammar"
NOT_ENFORCED = {
    "disable_additional_properties": "write additionalProperties: false in the schema",
    "disable_any_whitespace": "JSON may have white space: write a grammar without it",
    "structural_tag": TAGS,
    "whitespace_pattern": "white space in JSON is a space, or a line break and indentation: write a grammar",
}  # vLLM's members of structured_outputs -> the remedy

REFUSED = {
    "audio": "this server generates text",
    "function_call": "it is deprecated: use tool_choice",
    "functions": "it is deprecated: use tools",
    "moderation": "this server has no moderation",
    "reasoning_effort": "a completion has no chat template, which reads it: use /v1/chat/completions",
    "suffix": "this server does not fill in the middle",
    "verbosity": "the length of an answer is a matter of the prompt and of max_tokens",
    "web_search_options": "this server has no web search",
}
DEFAULTS = {"function_call": ("auto", "none"), "verbosity": ("medium",)}  # values of these that ask for nothing
NO_EFFECT = {
    "cache_control": "prefixes are found by their tokens",
    "cache_prompt": "prefixes are found by their tokens, and change no text",
    "guided_decoding_backend": "there is one, llguidance",
    "id_slot": "rows have no slots of their own",
    "keep_alive": "the model stays loaded",
    "metadata": "not stored, as nothing is",
    "n_discard": "texts that are longer than the context are refused",
    "n_keep": "texts that are longer than the context are refused",
    "prompt_cache_key": "prefixes are found by their tokens",
    "prompt_cache_options": "prefixes are found by their tokens",
    "prompt_cache_retention": "prefixes are kept until their room is needed",
    "request_id": "the ids of responses are this server's own",
    "rid": "the ids of responses are this server's own",
    "safety_identifier": "names the end user; there is no moderation",
    "service_tier": "there is one tier",
    "speculative.n_max": "drafts are sized by what they cost, and change no text",
    "speculative.n_min": "drafts are sized by what they cost, and change no text",
    "speculative.p_min": "drafts are sized by what they cost, and change no text",
    "sse_ping_interval": "streams have no comments between events",
    "store": "responses are not stored",
    "user": "names the end user; namespaces follow from API keys",
}


def _whole(given: Any) -> Any:
    """A number that JSON has as 8.0 is the integer 8; so in lists, and in lists of lists."""
    if isinstance(given, list) and not {*map(type, given)} <= {int, str}:
        return [_whole(each) for each in given]
    return int(given) if isinstance(given, float) and given.is_integer() else given


Name = Annotated[str, StringConstraints(max_length=LONGEST_NAME)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Whole = BeforeValidator(_whole)
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Whole, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Whole, Field(ge=0, lt=2**31)]
UNLIMITED = -1  # as max_tokens: up to the end of the context, as in llama.cpp
Most = Count | Annotated[Literal[-1], Whole]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class FirstFault(FailFast):
    """Reads a list up to its first fault: to collect millions of them would take minutes and gigabytes."""

    __hash__ = object.__hash__  # members of unions are hashed


List = Annotated[list[T], FirstFault()]
Objects = List[dict[str, Any]]


class Body(BaseModel):
    """Parameters that are not listed are refused, unless they are null; types are not converted, but for integers."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        check_count(len(given))
        return cls.read({name: value for name, value in given.items() if value is not None})

    @classmethod
    def read(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The parameters, from those that are given and not null."""
        return given


class Part(Body):
    """A part of a message's or a prediction's content."""

    type: Literal["text"]
    text: str


def _without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


class Prediction(Body):
    """OpenAI's predicted output: text that most of the answer is expected to repeat."""

    type: Literal["content"]
    content: str | List[Part]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextReference(Body):
    """A text that the answer may copy from."""

    type: Literal["text"]
    text: str


class FileReference(Body):
    """One of the files that the server was started with, by its name there."""

    type: Literal["file"]
    name: Name


class ResponseReference(Body):
    """An earlier response to the same namespace, by its id."""

    type: Literal["response"]
    id: Name


Reference = str | Annotated[TextReference | FileReference | ResponseReference, Field(discriminator="type")]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's format; a `schema` may stand next to its type, as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @classmethod
    def read(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("type") == "structural_tag":
            raise ApiError(400, f"response_format.type='structural_tag': {TAGS}", "response_format.type", UNSUPPORTED)
        if "schema" in given and "json_schema" not in given and given.get("type") in ("json_object", "json_schema"):
            schema = {"schema": given["schema"]}
            return {**_without(given, "schema"), "type": "json_schema", "json_schema": schema}
        return given

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type='json_schema': give both or neither")
        return self


class StructuredOutputs(Body):
    """vLLM's constraints: exactly one of them."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None

    @classmethod
    def read(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, remedy in NOT_ENFORCED.items():
            if given.get(name):
                param = f"structured_outputs.{name}"
                raise ApiError(400, f"{param}={given[name]!r:.80}: {remedy}", param, UNSUPPORTED)
        kept = _without(given, *NOT_ENFORCED, "disable_fallback")
        if isinstance(text := kept.get("json"), str):
            kept["json"] = _schema_of(text)
        return _without(kept, "json_object") if kept.get("json_object") is False else kept

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = (self.json_, self.regex, self.choice, self.grammar, self.json_object)
        if sum(value is not None for value in given) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar and json_object")
        return self


def _schema_of(text: str) -> Any:
    """A JSON schema that is given as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        param = "structured_outputs.json"
        raise ApiError(400, f"{param} is a text, and no JSON: {error}", param, "invalid_value") from None


def _few_biases(given: Any) -> Any:
    """The entries by token ids as text; pairs of token id and bias, as in llama.cpp, are entries too."""
    if isinstance(given, dict | list) and len(given) > MOST_BIASES:
        raise ValueError(f"it has {len(given)} entries, at most {MOST_BIASES} are looked at")
    pairs = given.items() if isinstance(given, dict) else given
    if isinstance(given, list) and not all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        raise ValueError("give an object of token ids and biases, or a list of pairs of these")
    return {_key(key): value for key, value in pairs} if isinstance(given, dict | list) else given


def _key(token: Any) -> str:
    """A token id as the text of its digits, from a number, or from a text such as 5.0."""
    text = str(_whole(token))
    return text.removesuffix(".0") if text.removesuffix(".0").isdigit() else text


class GenerationBody(Body):
    """What chat and completions have in common."""

    model: Name | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few_biases)] | None = None
    n: Count | None = None
    seed: Annotated[int, Whole, Field(ge=-(2**63), lt=SEEDS)] | None = None
    stop: str | List[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    # beyond OpenAI, as in vLLM
    top_k: Annotated[int, Whole, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    min_tokens: Natural | None = None
    stop_token_ids: Annotated[List[TokenId], Whole] | None = None
    bad_words: List[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Natural | None = None
    structured_outputs: StructuredOutputs | None = None
    # of this server
    references: List[Reference] | None = None
    draft: Name | None = None
    deadline: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    return_tokens: bool | None = None

    @classmethod
    def read(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The parameters under their names here, without those that ask for nothing.

        Raises:
            ApiError: one is not supported.
        """
        named = translated(given)
        for name, remedy in REFUSED.items():
            value = named.get(name)
            if value not in (None, "", [], {}, *DEFAULTS.get(name, ())) and name not in cls.model_fields:
                raise ApiError(400, f"{name} is not supported: {remedy}", name, UNSUPPORTED)
        chat = "messages" in cls.model_fields
        found = {name: value for name, value in named.items() if name in cls.model_fields}
        others = named.keys() - found.keys() - NO_EFFECT.keys() - REFUSED.keys()
        found |= {name: named[name] for name in others if not asks_nothing(name, named[name], named, chat)}
        if found.get("logprobs") is False:
            found = _without(found, "logprobs")
        return _without(found, "seed") if found.get("seed") == RANDOM else found


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[str | List[str] | List[TokenId] | List[List[TokenId]], Whole]
    max_tokens: Natural | Annotated[Literal[-1], Whole] | None = None
    echo: bool | None = None
    logprobs: Natural | None = None
    best_of: Count | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _best(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(
                400, f"best_of={self.best_of} is not n={self.n or 1}: this server returns all that it generates; use n",
                "best_of", "invalid_value",
            )  # fmt: skip
        return self


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`; messages and tools are checked where the chat template is applied."""

    messages: Objects
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Most | None = None
    max_completion_tokens: Most | None = None
    logprobs: bool | None = None
    top_logprobs: Natural | None = None
    modalities: List[Literal["text"]] | None = None
    documents: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None

    @classmethod
    def read(cls, given: dict[str, Any]) -> dict[str, Any]:
        found = super().read(given)
        for name in ("max_tokens", "max_completion_tokens"):
            found = _without(found, name) if found.get(name) == UNLIMITED else found  # as without it
        if "tool_choice" in found:
            found["tool_choice"] = _choice_of(found["tool_choice"])
        if not found.get("tools"):  # there is nothing to call
            idle = ("tool_choice",) if found.get("tool_choice") in ("auto", "none") else ()
            found = _without(found, "tools", "parallel_tool_calls", *idle)
        return _with_reasoning(found)

    @model_validator(mode="after")
    def _lengths(self) -> ChatBody:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ: give one of them", "max_tokens", "invalid_value"
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs", "invalid_value")
        return self


def _choice_of(given: Any) -> Any:
    """A choice of tools as OpenAI's chat API has it, from the forms of Mistral ("any"), Anthropic (`{"type": "any"}`,
    `{"type": "tool", "name": ...}`) and OpenAI's responses (`{"type": "function", "name": ...}`)."""
    if isinstance(given, dict) and given.keys() == {"type", "name"} and given["type"] in ("function", "tool"):
        return {"type": "function", "function": {"name": given["name"]}}
    if isinstance(given, dict) and given.keys() == {"type"}:
        given = given["type"]
    return "required" if given == "any" else given


def _with_reasoning(given: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a chat, those about reasoning as variables of its template."""
    kwargs = given.get("chat_template_kwargs", {})
    values = {name: given[name] for name in ("reasoning_effort", "enable_thinking") if name in given}
    if not values or not isinstance(kwargs, dict):
        return given
    for name, value in values.items():
        if kwargs.get(name) not in (None, value):
            raise ApiError(400, f"{name} and chat_template_kwargs.{name} differ: give one of them", name)
    return {**given, "chat_template_kwargs": {**kwargs, **values}}


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt, or messages as in chat."""

    model: Name | None = None
    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give a prompt or messages, one of the two", "prompt", "invalid_value")
        if self.messages is not None and self.add_special_tokens:
            reason = "add_special_tokens is for a prompt: the chat template of messages has its own; leave it out"
            raise ApiError(400, reason, "add_special_tokens", "invalid_value")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[List[TokenId], Whole]
