"""`accelerate(model)`: the `generate` of a `transformers` model in fewer passes, with the same result."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any
from weakref import WeakSet

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from truedraft import registry, reports
from truedraft.accept._base import Rule, extra_probes
from truedraft.call.arguments import (
    Assistant,
    Document,
    assistant_of,
    check_arguments,
    check_settings,
    for_decode_loop,
    note_beams,
    sources_of,
)
from truedraft.call.numbers import named, whole
from truedraft.call.outcome import cut, output
from truedraft.call.prepared import Call, Prepared, request_of
from truedraft.call.rechecking import check_ties
from truedraft.call.streaming import Stream, ending_streamer
from truedraft.call.surroundings import defaults, exclusive
from truedraft.canvas.accelerated import AcceleratedCanvas, check_for_canvas
from truedraft.canvas.layout import Layout, layout_of
from truedraft.canvas.renoised import AcceleratedRenoise, renoises
from truedraft.canvas.subset import AcceleratedSubset, reads_subsets
from truedraft.chance import Chance
from truedraft.continuous import PIECE_SECONDS, ContinuousEngine
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter
from truedraft.drafters._compose import name_of
from truedraft.errors import Refused
from truedraft.parts import by_model, check_references, drafter_of, fitted, part, parts_of, rule_for, view_of
from truedraft.runtime.quantize import quantize as quantized
from truedraft.runtime.released import bring_back, bytes_in_panels
from truedraft.runtime.released import release_weights as released
from truedraft.runtime.releasing import keep_originals, released_by_default
from truedraft.standin import StandIn, renewed
from truedraft.stats import Pass
from truedraft.stopwatch import Stopwatch
from truedraft.stores.memory import Memory
from truedraft.targets.generates import decide_as_generate
from truedraft.targets.hostable import check_hosted
from truedraft.targets.hosting import hosted
from truedraft.targets.pooling import UTILIZATION
from truedraft.targets.unwrapping import unwrapped
from truedraft.turns import Room
from truedraft.views._base import View


class Accelerated(StandIn):
    """A model with a faster `generate`; made by `accelerate`. Other attributes are the model's; see `StandIn`.

    Attributes:
        model: the model that was given, unchanged.
        target, drafter, rule, control: the parts in use; `rule` is None where each call chooses greedy or seeded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        draft: str | Drafter | None,
        rule: str | Rule | None,
        control: str | Control,
        runtime: str,
        strict: bool,
        view: View | None,
        ties: str,
    ):
        self.model, self.tokenizer = model, tokenizer
        self._parts, self._hosting = (draft, rule, control), (runtime, strict, view)
        self.target = hosted(model, *self._hosting)
        self.rule: Rule | None = None if rule is None else part(rule, "accept", Rule)
        self.drafter: Drafter = drafter_of(draft, self.target, tokenizer, self.rule)
        self._assisted: tuple[tuple[Any, ...], Drafter] | None = None
        self.control: Control = part(control, "control", Control)
        check_ties(ties, self.target, self.rule)
        self.ties = ties
        self._decide_ties()
        fitted(self.drafter, self.target, tokenizer)
        self._engines: WeakSet[ContinuousEngine] = WeakSet()
        self._complete()

    def _decide_ties(self) -> None:
        """Let a new target decide as `model.generate` where that was requested and it can; else note why not.

        Raises:
            Refused: a later call of `accelerate` keeps the weights once, so that the model's own products are gone.
        """
        if self.ties == "recheck" and bytes_in_panels(self.model):
            raise Refused(
                "ties='recheck' needs the model's own products, and accelerate(release_weights=True) was called since: "
                "call accelerate(ties='recheck') again"
            )
        self._why_again = decide_as_generate(self.target) if self.ties == "recheck" else ""

    def _call(self) -> AbstractContextManager[None]:
        """Exclusive use during a call: calls of other threads wait, also of models that share a part with this one."""
        parts = self, *parts_of([self.drafter]), self.rule, self.control
        return exclusive([part for part in parts if part is not None])

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerated:
        """A deep copy of the model, accelerated in the same way; its drafters start without learnt state."""
        draft, rule, control = (renewed(part, memo) for part in self._parts)
        memo[id(self)] = copied = Accelerated(
            copy.deepcopy(self.model, memo), self.tokenizer, draft, rule, control, *self._hosting, self.ties
        )
        return copied

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {type(self.model).__name__}: {self.model.num_parameters():,} parameters, "
            f"{str(self.model.dtype).removeprefix('torch.')} on {self.model.device}; drafter {name_of(self.drafter)}, "
            f"rule {'greedy, or seeded where it samples' if self.rule is None else name_of(self.rule)}, "
            f"control {name_of(self.control)}; passes by {self.target.runtime}>"
        )

    def forget(self) -> None:
        """Drop what drafters have learnt in earlier calls: texts, and acceptance statistics.

        Raises:
            Refused: requests of an engine are running.
        """
        with self._call():
            if any(engine.has_unfinished_requests() for engine in self._engines):
                raise Refused("forget() while requests of an engine run: finish or abort them first")
            self.drafter.forget()

    def save_memory(self, path: str | PathLike[str]) -> None:
        """Write the earlier outputs that drafters keep, with their namespaces, to a file, atomically.

        Between steps of an engine too: outputs of requests that run are not among them.

        Raises:
            Refused: the drafter keeps no outputs.
            OSError: the file cannot be written; a file that existed is unchanged.
        """
        with self._call():
            max(self._memories(), key=lambda memory: memory.limit).save(path, self.tokenizer)

    def load_memory(self, path: str | PathLike[str]) -> None:
        """Add the outputs in a file of `save_memory` to those that drafters keep, as the latest of their namespaces.

        Between steps of an engine too: requests that run draft from them.

        Raises:
            Refused: the drafter keeps no outputs; or the file is damaged, or of a model with other tokens.
        """
        with self._call():
            for memory in self._memories():
                memory.load(path, self.tokenizer, self.target.vocabulary)

    def _memories(self) -> Sequence[Memory]:
        if not (found := self.drafter.memories()):
            raise Refused(f"{name_of(self.drafter)} keeps no outputs: accelerate with draft='auto' or 'suffix'")
        return found

    @ending_streamer
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        references: Sequence[Document] | Sequence[Sequence[Document]] | None = None,
        seed: int | Sequence[int] | None = None,
        chance: Chance | None = None,
        namespace: str | Sequence[str] = "",
        on_pass: Callable[[Pass], None] | None = None,
        on_read: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`model.generate`, with its arguments and its return value, in fewer passes.

        Greedy: the tokens of `model.generate`. With `do_sample=True`: the tokens that `model.generate` samples
        under the same `torch.manual_seed`; torch's generator is left in the state in which it would leave it.
        A `streamer` is ended even after an error. One call runs at a time: calls from other threads wait for it. If
        the model was changed since the last call, in more than the values of its weights, passes are first compared
        with its own forward again.

        Args:
            inputs: (batch, length) prompt ids, as in `model.generate`; left-padded batches with their `attention_mask`.
                For an encoder-decoder the sources, which are also the first documents that drafts copy from.
            generation_config: as in `model.generate`.
            references: documents that the output may copy from, for drafters and rules that use them: texts or token
                ids, for every row; or one such list per row.
            seed: makes the noise of each row a function of (seed, row, position) instead of torch's stream, so that a
                row's text does not depend on the other rows; a list gives each row a seed of its own.
            chance: another source of noise.
            namespace: owner of the text, for drafters that keep outputs for later calls: they draft from them only for
                the same namespace. One for all rows, or a list.
            on_pass: called after every pass, with the tokens that it emitted.
            on_read: called while long prompts are read, with the tokens that are read and those of all rows' prompts.
            **kwargs: other arguments of `model.generate`.

        Returns:
            (batch, length) token ids, or with `return_dict_in_generate=True` a `GenerateDecoderOnlyOutput` (or
            `GenerateEncoderDecoderOutput`, of sequences, scores and logits) without `past_key_values`.

        Raises:
            Refused: a setting that cannot be honoured exactly, named before anything is computed; or a call within a
                call.
            KeyboardInterrupt: Ctrl-C. Once decoding has begun, the exception's `output` is the return value for the
                tokens up to the last complete pass, and its `report` that of `report()`.
        """
        kwargs["generation_config"] = generation_config
        assistant = assistant_of(kwargs)
        sources, streamer = sources_of(inputs, kwargs), kwargs.get("streamer")
        call = Call(references, assistant, seed, chance, namespace, streamer, on_pass, on_read, sources)
        with self._call(), defaults(), self._reporting():
            check_arguments(self.target, inputs, kwargs)
            if self.target.changed:
                self.target = hosted(self.model, *self._hosting)
                self._decide_ties()
            kwargs = for_decode_loop(self.target.encoded(inputs, kwargs), self.model, self.tokenizer)
            generate: Any = self.model.generate
            try:
                with named(kwargs, self.model):
                    return generate(inputs, custom_generate=self._decode, truedraft_call=call, **kwargs)
            finally:
                self.target.free()

    def engine(
        self,
        max_rows: int = 8,
        max_tokens: int = 2048,
        piece_seconds: float = PIECE_SECONDS,
        prefix_bytes: int = 0,
        share_prefixes: bool = False,
        kv_cache_memory_bytes: int | None = None,
        memory_utilization: float = UTILIZATION,
    ) -> ContinuousEngine:
        """A running batch that requests enter and leave between steps (continuous batching); see `ContinuousEngine`.
        It has a cache and a control of its own, so `generate` may be called while it exists.

        Requests share the memory for keys and values, and take of it as they grow: short ones run many at a time, long
        ones few.

        Args:
            max_rows: most requests that run at once.
            max_tokens: most tokens of a request, prompt and output together; sources of an encoder-decoder are not
                counted.
            piece_seconds: prompts are read in pieces between passes; that a piece should take at most, while rows
                wait for it.
            prefix_bytes: most bytes of keys and values that are kept of requests that ended, for prompts with the same
                prefix; 0 for none.
            share_prefixes: whether requests of one namespace may reuse those of another: it shows in `cached_tokens`,
                and in time, what others have asked.
            kv_cache_memory_bytes: most bytes of keys and values, of prefixes too, which give way to requests; by
                default what `memory_utilization` leaves.
            memory_utilization: share of the device's memory that may be in use, by whatever, once this is full.

        Raises:
            Refused: a size is of another type or out of range, or a request of `max_tokens` does not fit in memory.
        """
        if self.ties != "keep":
            raise Refused(f"ties={self.ties!r} is for generate(): engine() keeps the choices of its passes")
        if (view := self.target.view) is not None and view.varies:
            raise Refused(f"under {view.lossy} rows that began at different times run different layers: use generate()")
        with self._call():
            engine = ContinuousEngine(
                self.model, self.tokenizer, self.drafter, self._parts[1], self.control.another(), self._hosting,
                max_rows, max_tokens, piece_seconds, prefix_bytes, share_prefixes, kv_cache_memory_bytes,
                memory_utilization,
            )  # fmt: skip
            self._engines.add(engine)
            return engine

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        truedraft_call: Call,
        **model_kwargs: Any,
    ) -> Any:
        """The decode loop, which `model.generate` calls as `custom_generate` with what it has prepared."""
        call, watch = truedraft_call, Stopwatch()
        prepared = Prepared(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        check_settings(generation_config)
        drafter = fitted(self._drafter_of(generation_config, call), self.target, self.tokenizer)
        rule = rule_for(self.rule, bool(generation_config.do_sample), drafter)

        memory = Room(self.target, lambda: drafter.width + extra_probes(rule, drafter.width), self.ties)
        request = request_of(prepared, call, self.target, self.tokenizer, drafter, rule, self.ties, memory.reserve)
        rows, laws, stops, history = request.rows, request.laws, request.stops, request.history
        self._report = report = reports.new_report(self.target, drafter, rule, self.control, watch.seconds)
        report.passes, report.drafted_by = request.passes, [row.drafted_by for row in request.rows]
        report.notes += [*reports.notes_on(rows, laws, stops), *reports.notes_on_ties(self._why_again), *memory.notes]
        engine, stream = memory.engine(request, self.control), Stream(call.streamer, rows, history)
        watch.attach(engine)
        engine.admit(request)
        self.target.on_read = call.on_read
        advance = watch.timed_steps(engine.step)
        try:
            while engine.running:
                if not advance():
                    continue
                request.check()
                if call.on_pass is not None:
                    call.on_pass(request.passes[-1])
                stream.put()
            return output(self.target.output_class, rows, history, laws, prepared.returns)
        except KeyboardInterrupt as interrupt:
            report.interrupted = True
            report.notes.append("interrupted: the text ends with the last pass that was completed")
            cut(rows, report.passes, stops.lockstep)
            text = output(self.target.output_class, rows, history, laws, prepared.returns)
            vars(interrupt).update(output=text, report=report)
            raise
        finally:
            self.target.on_read = None
            engine.close()
            reports.complete(report, self.target, request.rule)

    def _drafter_of(self, config: GenerationConfig, call: Call) -> Drafter:
        references, assistant = call.references, call.assistant
        drafting = {
            "references": references, "assistant_model": assistant,
            "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens,
        }  # fmt: skip
        if len(given := [name for name, value in drafting.items() if value is not None]) > 1:
            raise Refused(f"{' and '.join(given)} select different drafters: give one of them")
        if assistant is not None:
            return self._assistant(assistant, config)
        if (length := config.prompt_lookup_num_tokens) is not None:
            lengths = {"length": whole("prompt_lookup_num_tokens", length)}
            lengths["n"] = whole("max_matching_ngram_size", config.max_matching_ngram_size or 2)
            return registry.load("drafters", "prompt-lookup", **lengths)
        check_references(references, self.drafter, self.rule)
        return self.drafter

    def _assistant(self, assistant: Assistant, config: GenerationConfig) -> Drafter:
        """The drafter of an `assistant_model`, with the lengths that transformers would use; kept for later calls."""
        model = unwrapped(assistant.model)
        settings = getattr(model, "generation_config", None)
        knobs: dict[str, Any] = {}
        for knob, name in (("length", "num_assistant_tokens"), ("confidence", "assistant_confidence_threshold")):
            value = getattr(config, name, None)
            value = getattr(settings, name, None) if value is None else value
            if value is not None:
                knobs[knob] = whole(name, value) if knob == "length" else value
        key = model, assistant.tokenizer, knobs
        if self._assisted is None or any(
            mine is not given and mine != given for mine, given in zip(self._assisted[0], key, strict=True)
        ):
            self._assisted = None
            made = by_model(model, self.target, self.tokenizer, self.rule, assistant.tokenizer, **knobs)
            self._assisted = key, made
        return self._assisted[1]


def _change_weights(model: Any, quantize: str | None, release_weights: bool | None, runtime: str, ties: str) -> None:
    """Quantise the weights of a model, keep them once where that is requested or the default, and make them again where
    an earlier call did so and its own products are needed."""
    own_products = ties == "recheck" or runtime != "auto"
    if release_weights and ties == "recheck":
        raise Refused(
            "release_weights=True keeps the weights as compiled passes read them, and ties='recheck' needs the model's "
            "own products: leave one of them out"
        )
    if quantize is not None or release_weights:
        check_hosted(model)
    if quantize is not None:
        bring_back(model)
        quantized(model, quantize)
    if release_weights is False or (own_products and not release_weights):
        bring_back(model)
        keep_originals(model)
    elif release_weights or released_by_default(model):
        released(model)


def accelerate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft: str | Drafter | None = "auto",
    rule: str | Rule | None = None,
    control: str | Control = "cost",
    runtime: str = "auto",
    strict: bool = False,
    quantize: str | None = None,
    ties: str = "keep",
    view: str | View | None = None,
    layout: Layout | None = None,
    release_weights: bool | None = None,
) -> Accelerated:
    """A model whose `generate` drafts and verifies, with the output of `model.generate`.

    Args:
        model: a decoder language model, an encoder-decoder or a diffusion language model of `transformers`, in eval
            mode; not changed but for `quantize` and `release_weights`. A wrapper of PEFT or `torch.compile` is removed
            where that is exact.
        tokenizer: required only for text (stop strings, references as text).
        draft: a drafter, its name (`truedraft methods` lists them; knobs as in "prompt-lookup:length=20"), a smaller
            model, or None for plain decoding; "auto" needs no training and uses references if there are any.
        rule: an acceptance rule or its name; by default `greedy`, or `seeded` where generate samples: both give the
            tokens of `model.generate`. Others sample different tokens of the same distribution (`truedraft methods`
            lists them); "lossy/NAME" is a lossy one, which changes the distribution.
        control: sets the sizes of drafts; "cost" from costs measured on this machine, "fixed" always drafts in full.
        runtime: "auto" makes passes by compiled code where it can replace the model's forward (on the CPU, for the
            common architectures): faster, and the same bits at any width; on a GPU by CUDA graphs captured from the
            model's forward. "stock" always calls the model's own forward.
        strict: refuse where a pass could depend on how many tokens it verifies (floating point rounds differently at
            different widths); with the compiled pass it cannot.
        quantize: "int8" or "int4" quantises the weights of the model itself, by torchao: fewer bytes to read, another
            model. The output is then exactly that of the quantised model, as is that of `model.generate`.
        ties: "recheck" chooses tokens by the logits of `model.generate`, so that the text in bf16 is its own: by passes
            with its bits, where the model has them on this machine, which is measured; else near-ties are computed
            again by the model's own forward, one token at a time, at about its cost. "keep" keeps the choices of the
            pass.
        view: "lossy/NAME" generates under a view (`truedraft methods` lists them): an approximation of the model, and
            another text. Prompts are read by the whole model, and all that follows is as under the view alone; the
            report and its guarantee are labelled. `truedraft bench --lossy` measures the quality beside the speed.
        layout: how a diffusion language model reads a canvas; by default as its configuration declares it, or as models
            of its type do. Such models have drafts and rules of their own: `draft` proposes later canvases, `rule` is
            the step-by-step decoding whose text is reproduced, or "lossy/NAME"; the result is an `AcceleratedCanvas`
            (of a `diffusion_gemma`, which has none of these, an `AcceleratedRenoise`; of any-subset models, which fill
            masks anywhere, an `AcceleratedSubset`).
        release_weights: keep the weights of the model itself once, as compiled passes read them: the same bits in half
            the memory. It can no longer be trained or saved, nor its weights be written to. By default of models from
            `truedraft.load` alone, and not with `ties="recheck"` or another `runtime`, which need the weights as they
            were.

    Raises:
        Refused: the model cannot be hosted exactly, or not strictly, quantised or under the view, or a name is unknown.

    Warns:
        Note: the model's generation config searches with beams, which `generate` refuses.
    """
    model = unwrapped(model)
    with defaults():
        _change_weights(model, quantize, release_weights, runtime, ties)
        if renoises(model):
            check_for_canvas(ties, control)
            return AcceleratedRenoise(model, tokenizer, draft, rule, runtime, strict, layout, view)  # type: ignore
        if reads_subsets(model):
            check_for_canvas(ties, control)
            return AcceleratedSubset(model, tokenizer, draft, rule, runtime, strict, layout, view)  # type: ignore
        if (layout := layout or layout_of(getattr(model, "config", None), tokenizer)) is not None:
            check_for_canvas(ties, control)
            return AcceleratedCanvas(model, tokenizer, draft, rule, control, runtime, strict, layout, view)  # type: ignore
        lossy = None if view is None else view_of(view)
        note_beams(model)
        return Accelerated(model, tokenizer, draft, rule, control, runtime, strict, lossy, ties)
