"""Load and accelerate a model by its name and the names of the methods."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from truedraft import loading
from truedraft.bench.sizes import size_of
from truedraft.canvas.layout import attending
from truedraft.cli._options import TEXT, check_kind, check_names, use_threads
from truedraft.cli._text import waiting
from truedraft.errors import Note

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from truedraft.accelerated import Accelerated

for logger in ("torchao", "torch.utils._pytree"):  # transformers loads torchao wherever it is installed
    logging.getLogger(logger).setLevel(logging.ERROR)


def load(
    name: str,
    dtype: str = "auto",
    quantize: str | None = None,
    argument: str = "MODEL",
    reads_sources: str | None = None,
    stretched: str | None = None,
    runs: Collection[loading.Kind] = TEXT,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """As `loading.load`, without the log output of the libraries, for commands that train the model or measure its own
    forward: its weights stay as they are.

    stretched: the size to which the model is stretched, see `bench.sizes.size_of`.
    runs: kinds of models that the command runs.

    Raises:
        Refused: as `loading.load`; or it is a model of another kind.
    """
    from truedraft.runtime.releasing import keep_originals

    loaded = _loaded(name, dtype, quantize, argument, reads_sources, stretched, runs)
    keep_originals(loaded[0])
    return loaded


def _loaded(
    name: str, dtype: str, quantize: str | None, argument: str, reads_sources: str | None, stretched: str | None,
    runs: Collection[loading.Kind],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:  # fmt: skip
    """A model whose weights may be replaced; see `load`."""
    from truedraft.runtime.releasing import may_release

    _hush()
    check_kind(loading.kind_of(loading.check(name, dtype, quantize, argument)), name, argument, runs)
    if stretched is None:
        loaded = loading.load(name, dtype, quantize, argument, reads_sources)
        check_kind(_kind(loaded[0]), name, argument, runs)
        if dtype == "auto" and loading.names_no_dtype(loading.source_of(name, argument)):
            chosen = str(loaded[0].dtype).removeprefix("torch.")
            warnings.warn(f"{argument} {name!r}: activations in {chosen}, which decodes fastest here", Note, 2)
        return loaded
    layers, hidden = size_of(stretched, name)
    from truedraft.bench import stretched as stretching
    from truedraft.runtime.quantize import quantize as quantized

    model, tokenizer = loading.load(name, dtype, None, argument, reads_sources)
    larger = stretching.stretched(model, layers=layers, hidden=hidden)
    if quantize is not None:
        quantized(larger, quantize)
    may_release(larger)
    return larger, tokenizer


def load_tokenizer(name: str, argument: str) -> PreTrainedTokenizerBase:
    """As `loading.load_tokenizer`, without the log output of the libraries."""
    _hush()
    return loading.load_tokenizer(name, argument)


def machine() -> str:
    """The machine and the versions that this process runs on, in one line."""
    import platform

    import torch
    import transformers

    return (
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def _kind(model: PreTrainedModel) -> loading.Kind:
    return loading.kind_by(model.config.to_dict())


def _hush() -> None:
    import huggingface_hub
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()


def accelerated(
    name: str,
    dtype: str,
    draft: str,
    control: str = "cost",
    quantize: str | None = None,
    rule: str | None = None,
    argument: str = "MODEL",
    reads_sources: str | None = None,
    threads: int | None = None,
    ties: str = "keep",
    stretched: str | None = None,
    view: str | None = None,
    attention: str | None = None,
    runs: Collection[loading.Kind] = TEXT,
    release_weights: bool | None = None,
) -> Accelerated:
    """Load and accelerate a model, with drafter, rule and control by name; a diffusion model as `AcceleratedCanvas`, an
    any-subset model as `AcceleratedSubset`.

    threads: of torch; None leaves them as they are. attention: of a diffusion model, if not as it declares.
        release_weights: see `accelerate`. The other arguments are those of `load`.

    Raises:
        Refused: a name is unknown, or the model cannot be hosted exactly.
    """
    names: dict[str, Any] = {"drafts": [draft], "control": control, "rule": rule, "views": [view]}
    check_names(name, dtype, quantize, argument, **names, attention=attention, runs=runs)
    if stretched is not None:
        size_of(stretched, name)
    with waiting("loading the model"):
        use_threads(threads)
        from truedraft import accelerate, registry

        _hush()
        parts: dict[str, Any] = {"draft": draft, "control": control, "rule": rule}
        made = parts
        if loading.kind_of(loading.check(name, dtype, quantize, argument)) == "text":
            # first, so that a wrong knob fails before the model is loaded
            kinds = {"draft": "drafters", "control": "control", "rule": "accept"}
            made = {part: spec and registry.load(kinds[part], spec) for part, spec in parts.items()}
        loaded = _loaded(name, dtype, quantize, argument, reads_sources, stretched, runs)
        if _kind(loaded[0]) != "text":  # of the hub, it is known only now
            made = parts
        layout = attending(loaded[0].config, loaded[1], attention, f"{argument} {name!r}")
        return accelerate(*loaded, **made, ties=ties, view=view, layout=layout, release_weights=release_weights)
