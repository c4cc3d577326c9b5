"""Bodies of requests, as in OpenAI's API reference, with vLLM's names for what goes beyond it, and our own additions.

`REFUSED` and `NO_EFFECT` list the parameters of OpenAI's schema that are refused, with the remedy, and those that
change nothing by their definition; every other one is honoured.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, StringConstraints, model_validator

from truedraft.serve.errors import ApiError

T = TypeVar("T")
LONGEST_NAME = 256
MOST_BIASES = 1 << 16  # entries of logit_bias that are checked one by one
MOST_KEYS = 256  # names in an object of parameters that are checked one by one
SEEDS = 2**64

REFUSED = {
    "audio": "this server generates text",
    "function_call": "it is deprecated: use tool_choice",
    "functions": "it is deprecated: use tools",
    "moderation": "this server has no moderation",
    "reasoning_effort": "how much a model reasons is a matter of its template: use chat_template_kwargs",
    "suffix": "this server does not fill in the middle",
    "verbosity": "the length of an answer is a matter of the prompt and of max_tokens",
    "web_search_options": "this server has no web search",
}
NO_EFFECT = {
    "metadata": "not stored, as nothing is",
    "prompt_cache_key": "prefixes are found by their tokens",
    "prompt_cache_options": "prefixes are found by their tokens",
    "prompt_cache_retention": "prefixes are kept until their room is needed",
    "safety_identifier": "names the end user; there is no moderation",
    "service_tier": "there is one tier",
    "store": "responses are not stored",
    "user": "names the end user; namespaces follow from API keys",
}

Name = Annotated[str, StringConstraints(max_length=LONGEST_NAME)]
Probability = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class FirstFault(FailFast):
    """Reads a list up to its first fault: to collect millions of them would take minutes and gigabytes."""

    __hash__ = object.__hash__  # members of unions are hashed


List = Annotated[list[T], FirstFault()]
Objects = List[dict[str, Any]]


class Body(BaseModel):
    """Parameters that are not listed are refused; types are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MOST_KEYS:
            raise ValueError(f"an object with {len(given)} names: leave out what is no parameter")
        return given


class Part(Body):
    """A part of a message's or a prediction's content."""

    type: Literal["text"]
    text: str


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
    name: Name
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type='json_schema': give both or neither")
        return self


class StructuredOutputs(Body):
    """vLLM's constraints: exactly one of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("give exactly one of json, regex, choice and grammar")
        return self


def _few_biases(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MOST_BIASES:
        raise ValueError(f"it has {len(given)} entries, at most {MOST_BIASES} are looked at")
    return given


class GenerationBody(Body):
    """What chat and completions have in common."""

    model: Name | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few_biases)] | None = None
    n: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=SEEDS)] | None = None
    stop: str | List[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    # beyond OpenAI, as in vLLM
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: List[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    structured_outputs: StructuredOutputs | None = None
    # of this server
    references: List[Reference] | None = None
    draft: Name | None = None
    deadline: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    return_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Refuse what is not supported by its own sentence, and drop what has no effect."""
        if not isinstance(given, dict):
            raise ValueError("the body is no JSON object")
        for name, remedy in REFUSED.items():
            if given.get(name) is not None and name not in cls.model_fields:
                raise ApiError(400, f"{name} is not supported: {remedy}", name, "unsupported_parameter")
        return {
            name: value for name, value in given.items()
            if name in cls.model_fields or (name not in NO_EFFECT and not (name in REFUSED and value is None))
        }  # fmt: skip


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | List[str] | List[TokenId] | List[List[TokenId]]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Count | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _best(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(
                f"best_of={self.best_of} is not n={self.n or 1}: this server returns all that it generates"
            )
        return self


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`; messages and tools are checked where the chat template is applied."""

    messages: Objects
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    modalities: List[Literal["text"]] | None = None
    documents: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _lengths(self) -> ChatBody:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


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
            raise ValueError("give a prompt or messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is for a prompt: the chat template of messages has its own")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: List[TokenId]
