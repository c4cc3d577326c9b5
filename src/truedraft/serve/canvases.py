"""A served diffusion model: what its requests may not ask for, and its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import StoppingCriteria

from truedraft.canvas.accelerated import AcceleratedCanvas
from truedraft.canvas.ending import OutputStrings
from truedraft.errors import Refused
from truedraft.serve.config import ServeConfig
from truedraft.serve.errors import ApiError
from truedraft.serve.model import ServedModel
from truedraft.serve.protocol import GenerationBody
from truedraft.serve.stops import Shown

PREFIX = "positions of a diffusion model are not fixed from left to right, so there is no prefix that it could read"
COPIED = "diffusion models copy from no texts"
SCORED = "positions of a diffusion model are scored before all that stands before them is known"
MEANINGLESS = {  # parameter -> why it has no meaning
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens", "response_format"), PREFIX),
    **dict.fromkeys(("structured_outputs", "tools", "logit_bias", "bad_words"), PREFIX),
    **dict.fromkeys(("references", "prediction"), COPIED),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), SCORED),
}
COUNTS = ("logprobs", "prompt_logprobs")  # of which 0 asks for something too
SETTINGS = ("memory", "reference", "allow_draft", "share_prefixes")  # of servers of autoregressive models


class ServedCanvas(ServedModel):
    """A diffusion model; as `ServedModel`.

    Raises:
        Refused: a setting of the server has no meaning for it.
    """

    def __init__(self, fast: AcceleratedCanvas, config: ServeConfig):
        for name in SETTINGS:
            if value := getattr(config, name):
                raise Refused(f"{name}={value!r} is for autoregressive models: leave it out for a diffusion model")
        super().__init__(fast, config)

    @property
    def scores_prompts(self) -> bool:
        return False

    def _loaded(self, name: str) -> Any:
        return None if name == "none" else "default"

    def drafter(self, name: str | None, copies: bool, constrained: bool) -> Any:
        """ "default", or None for one canvas per pass."""
        return super().drafter(name, False, False)

    def before_switch(self, prompt: int) -> None:
        """None: canvases are read as a whole in every pass, by the embeddings of their whole length."""

    def check(self, body: GenerationBody) -> None:
        for name, reason in MEANINGLESS.items():
            value = getattr(body, name, None)
            if (value or (name in COUNTS and value == 0 and value is not False)) and not (
                name == "response_format" and value.type == "text"
            ):
                raise ApiError(400, f"{name}: {reason}: leave it out", name, "unsupported_parameter")
        if body.repetition_penalty not in (None, 1.0):
            raise ApiError(
                400, f"repetition_penalty={body.repetition_penalty}: {PREFIX}: leave it out", "repetition_penalty",
                "unsupported_parameter",
            )  # fmt: skip

    def stops(self, prompt: Sequence[int], shown: Shown) -> StoppingCriteria:
        return OutputStrings(self.tokenizer, list(shown.stop), len(prompt))
