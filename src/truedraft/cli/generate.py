"""`truedraft generate`: the output of `model.generate`, in fewer passes."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from truedraft.cli._models import accelerated
from truedraft.cli._options import SUBSETS, AttentionOption, Control, Dtype, Quantize, Threads, View, check_names
from truedraft.cli._request import Request, check_seed, of_canvas, read_prompts, read_settings
from truedraft.cli._text import read, reading, waiting
from truedraft.errors import Note, Refused
from truedraft.loading import check, kind_of
from truedraft.packaged import MODEL_HELP
from truedraft.text.pieces import Pieces, whole_text

if TYPE_CHECKING:
    from truedraft.accelerated import Accelerated
    from truedraft.stats import Pass


def generate(
    model: Annotated[str, Argument(metavar="MODEL", help=MODEL_HELP)],
    prompt: Annotated[str | None, Argument(metavar="PROMPT", help="- or nothing reads standard input.")] = None,
    file: Annotated[Path | None, Option(help="Read the prompt from a file; one final newline is dropped.")] = None,
    prompts: Annotated[
        Path | None, Option(help="Many prompts from a file, JSON lines or text as `bench` reads; output in its order.")
    ] = None,
    draft: Annotated[
        str, Option(help="A drafter, `name:knob=value`, auto, or none (see `truedraft methods`).")
    ] = "auto",
    rule: Annotated[str | None, Option(help="An acceptance rule; by default the output is the model's.")] = None,
    view: View = None,
    attention: AttentionOption = None,
    control: Control = "cost",
    ties: Annotated[str, Option(help="keep or recheck: near-ties scored again as transformers does.")] = "keep",
    reference: Annotated[list[Path] | None, Option(help="A text that the output may copy from; repeatable.")] = None,
    max_new_tokens: Annotated[int, Option(help="Most new tokens.")] = 128,
    min_new_tokens: Annotated[int | None, Option(help="Fewest new tokens.")] = None,
    sample: Annotated[bool, Option("--sample/--greedy", help="Sample, or choose the likeliest token.")] = False,
    temperature: Annotated[float | None, Option(help="Above 1 flattens the distribution, below 1 sharpens it.")] = None,
    top_k: Annotated[int | None, Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, Option(help="Sample among the likeliest tokens of this total mass.")] = None,
    min_p: Annotated[float | None, Option(help="Drop tokens below this share of the likeliest one.")] = None,
    typical_p: Annotated[float | None, Option(help="Locally typical sampling with this mass.")] = None,
    epsilon_cutoff: Annotated[float | None, Option(help="Drop tokens below this probability.")] = None,
    eta_cutoff: Annotated[float | None, Option(help="Eta sampling's cutoff.")] = None,
    repetition_penalty: Annotated[float | None, Option(help="Above 1 makes repeated tokens less likely.")] = None,
    no_repeat_ngram_size: Annotated[int | None, Option(help="Never repeat an n-gram of this size.")] = None,
    stop: Annotated[list[str] | None, Option(help="End after this string; repeatable.")] = None,
    eos: Annotated[list[int] | None, Option(help="End at this token id; repeatable.")] = None,
    num_return_sequences: Annotated[int, Option("--num-return-sequences", "-n", help="How many texts.")] = 1,
    max_time: Annotated[float | None, Option(help="End after this many seconds.")] = None,
    seed: Annotated[int | None, Option(help="Seed for torch.manual_seed.")] = None,
    block_length: Annotated[int | None, Option(help="Positions in a block; of a diffusion model.")] = None,
    steps: Annotated[int | None, Option(help="Steps of decoding; of a diffusion model, one per position.")] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Another GenerationConfig field; repeatable.")
    ] = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    threads: Threads = None,
    chat: Annotated[bool, Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    stream: Annotated[bool | None, Option(help="Stream the text; by default on a terminal.")] = None,
    report: Annotated[bool, Option("--report", help="Print the figures of the run on stderr.")] = False,
    as_json: Annotated[
        bool, Option("--json", help="One JSON object for each prompt: text, token_ids, figures.")
    ] = False,
) -> int:
    """Generate text: the tokens of model.generate under the same settings and seed, in fewer passes.

    The prompt of an encoder-decoder is its source. An any-subset model fills the masks of its prompt, and the output is
    the whole text.

    \f
    Returns the exit code: 0, or 130 where Ctrl-C cut the text short. Raises Refused for a bad argument.
    """
    fields = {
        "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens, "do_sample": sample, "max_time": max_time,
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p,
        "epsilon_cutoff": epsilon_cutoff, "eta_cutoff": eta_cutoff, "repetition_penalty": repetition_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size, "stop_strings": stop or None, "eos_token_id": eos or None,
        "num_return_sequences": num_return_sequences,
    }  # fmt: skip
    output = _output(stream, as_json, report, num_return_sequences)
    documents = [read(path, "--reference") for path in reference or ()]
    check_seed(seed, sample)
    read_items = read_prompts(prompt, file, prompts)
    names: dict[str, Any] = {"drafts": [draft], "control": control, "rule": rule, "views": [view]}
    check_names(model, dtype, quantize, **names, attention=attention, runs=SUBSETS)
    shortest = 0 if kind_of(check(model, dtype, quantize)) == "subset" else 1  # its masks may be all that is filled
    config = read_settings(fields, settings or (), shortest) | of_canvas(block_length, steps)
    fast = accelerated(
        model, dtype, draft, control, quantize, rule, threads=threads, ties=ties, view=view, attention=attention,
        runs=SUBSETS,
    )  # fmt: skip
    items = read_items(fast.target.reads_sources)
    places = [f"prompt {i} of {len(items)}" for i in range(1, len(items) + 1)] if prompts is not None else [""]
    requests = [
        Request(item.text, config, [*documents, *item.references], seed, chat, place and f"{place}: ")
        for place, item in zip(places, items, strict=True)
    ]
    for request in requests:
        request.check(fast)
    if any(request.masks(fast) for request in requests):
        output = output.unstreamed(stream)
    return output.write_all(fast, requests)


def _output(stream: bool | None, as_json: bool, report: bool, texts: int) -> Output:
    if stream and as_json:
        raise Refused("--stream and --json were both given: choose one")
    if stream and texts > 1:
        raise Refused(f"--stream shows one text, --num-return-sequences is {texts}: drop one of them")
    if stream is None:
        stream = texts == 1 and not as_json and sys.stdout.isatty()
    return Output(stream, as_json, report)


@dataclass(frozen=True)
class Output:
    """The form of the output."""

    stream: bool
    as_json: bool
    report: bool

    def unstreamed(self, stream: bool | None) -> Output:
        """The form of texts whose prompts have masks; raises Refused where a stream of them was requested."""
        if stream:
            raise Refused("--stream shows text after a prompt, and masks are within it: drop --stream")
        return replace(self, stream=False)

    def write_all(self, fast: Accelerated, requests: Sequence[Request]) -> int:
        """Run the requests in order and write their texts; returns the exit code.

        Raises:
            Refused: a request is not supported.
        """
        for request in requests:
            if request.place and not self.as_json:
                print(f"--- {request.place.removesuffix(': ')} ---", flush=True)
            rows = self.run(fast, request)
            if code := self.write(fast, rows):
                return code
            ended = max(map(len, rows)) <= 1 and request.settings.get("max_new_tokens") != 1
            if ended and not request.chat and getattr(fast.tokenizer, "chat_template", None):
                what = "the model ended its text at once; it answers messages in its chat template: add --chat"
                warnings.warn(f"{request.place}{what}", Note, stacklevel=2)
        return 0

    def run(self, fast: Accelerated, request: Request) -> list[list[int]]:
        """The new ids of every text; streams the text if requested."""
        pieces, tokens = Pieces(fast.tokenizer), 0  # type: ignore[arg-type]
        with waiting("reading the prompt") as show:

            def on_pass(done: Pass) -> None:
                nonlocal tokens
                tokens += sum(len(emission.tokens) for emission in done.emitted)
                if not self.stream:
                    show(f"writing: {tokens} tokens")
                    return
                show(None)
                for emission in done.emitted:
                    print(pieces.feed(emission.tokens), end="", flush=True)

            rows = request.run(fast, on_pass, reading(show, "reading the prompt"))
        if self.stream:
            print(pieces.end())
        return rows

    def write(self, fast: Accelerated, rows: Sequence[list[int]]) -> int:
        """Print the texts, unless streamed, and the figures; returns the exit code."""
        report = fast.report()
        texts = [whole_text(fast.tokenizer, ids) for ids in rows]  # type: ignore[arg-type]
        if self.as_json:
            one = len(rows) == 1
            result = {"text": texts[0] if one else texts, "token_ids": rows[0] if one else rows}
            print(json.dumps(result | report.as_dict()), flush=True)
        elif len(texts) > 1:
            for i, text in enumerate(texts, 1):
                print(f"--- {i} of {len(texts)} ---\n{text}")
        elif not self.stream:
            print(texts[0])
        if self.report:
            print(report, file=sys.stderr)
        return 130 if report.interrupted else 0
