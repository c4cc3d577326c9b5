"""Models by name, accelerated with methods by theirs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from truedraft import loading
from truedraft.cli._options import check_names, use_threads
from truedraft.cli._text import waiting

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from truedraft.accelerated import Accelerated

for chatty in ("torchao", "torch.utils._pytree"):  # transformers loads torchao wherever it is installed
    logging.getLogger(chatty).setLevel(logging.ERROR)


def load(
    name: str,
    dtype: str = "auto",
    quantize: str | None = None,
    argument: str = "MODEL",
    reads_sources: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """As `loading.load`, without what the libraries print meanwhile."""
    _hush()
    return loading.load(name, dtype, quantize, argument, reads_sources)


def load_tokenizer(name: str, argument: str) -> PreTrainedTokenizerBase:
    """As `loading.load_tokenizer`, without what the libraries print meanwhile."""
    _hush()
    return loading.load_tokenizer(name, argument)


def machine() -> str:
    """What the figures of this process are figures of, in words."""
    import platform

    import torch
    import transformers

    return (
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


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
) -> Accelerated:
    """A model by name with a drafter, a rule and a control by theirs, on so many threads.

    The other arguments are those of `loading.load`.

    Raises:
        Refused: a name is unknown, or the model cannot be hosted exactly.
    """
    check_names(name, dtype, quantize, argument, drafts=[draft], control=control, rule=rule)
    with waiting("loading the model"):
        use_threads(threads)
        from truedraft import accelerate, registry

        _hush()
        drafter = registry.load("drafters", draft)  # a wrong knob does not wait for a model to load
        controller = registry.load("control", control)
        judge = None if rule is None else registry.load("accept", rule)
        loaded = load(name, dtype, quantize, argument, reads_sources)
        return accelerate(*loaded, draft=drafter, rule=judge, control=controller, ties=ties)
