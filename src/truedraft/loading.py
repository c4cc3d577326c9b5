"""Models by name: embedded, a local folder, or the Hugging Face hub."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import re
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from truedraft import assets, packaged
from truedraft.canvas.layout import SUBSETS, declares
from truedraft.errors import Note, Refused, why
from truedraft.runtime import QUANTIZED, checkpoints
from truedraft.runtime.checkpoints import adapters, ends
from truedraft.targets import kinds
from truedraft.targets.unwrapping import unwrapped

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from truedraft.runtime.checkpoints._base import Checkpoint

Kind = Literal["text", "canvas", "subset"]  # a text from left to right, a diffusion or an any-subset model
TOKENIZERS = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.spm")  # files that tokenizers are read from
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICE = re.compile(r"(.+)@((?:cpu|cuda|mps|xpu)(?::\d+)?)")  # a name, and the device that the model is loaded to
NAMED = 3  # tensors that a message names
REMEDY = "download or save the model anew, with the config.json of these weights"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within the block, no log output of torchao about parts that it has for other devices: transformers loads it
    wherever it is installed."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@_quiet()
def load(
    name: str | Path,
    dtype: str | torch.dtype = "auto",
    quantize: str | None = None,
    argument: str = "MODEL",
    reads_sources: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A decoder language model or an encoder-decoder in eval mode and its tokenizer, set up for generation.

    Embedded models run on the CPU, in float32 by default, as packaged ones do; others on the GPU where there is one;
    any on the device that its name ends with, as in NAME@cpu or NAME@cuda:1. The weights of any can be quantised, to
    "int8" or "int4". Quantised checkpoints stay as they are on a CPU: folders of GPTQ, AWQ or compressed-tensors, and
    files of GGUF. A folder that has only an adapter of PEFT is loaded with the model that it names, into which the
    adapter is merged. "smollm2" is read from the package that has it, see `packaged.py`.

    Args:
        name: of an embedded model, a folder, a .gguf file, or a model on the hub.
        dtype: "auto", "float32", "bfloat16" or "float16", or one of torch; of the activations of quantised
            checkpoints. By default that of the checkpoint, where a quantised one's float16 is float32. A file of GGUF
            names none: it gets the one that decodes fastest on this processor (`model.dtype`), bfloat16 where products
            are those of integers (docs/runtime.md), else float32.
        quantize: "int8" or "int4".
        argument: the argument's name in messages.
        reads_sources: the command that needs an encoder-decoder, for messages; None where both kinds are accepted.

    Raises:
        Refused: no such model, device or dtype, a damaged one, one that does not generate, one of the other kind, or a
            checkpoint that lacks weights of its model.

    Warns:
        Note: the checkpoint has tensors that its model does not use; or it is quantised, and predicts no text.
    """
    name, dtype = str(name), _named(dtype)
    source, whole = check(name, dtype, quantize, argument), f"{argument} {name!r}"
    if isinstance(source, Path) and adapters.is_adapter(source):
        return _with_adapter(source, name, dtype, quantize, argument, reads_sources)
    import transformers
    from transformers import AutoTokenizer

    device = device_of(name, argument)
    embedded = split(name)[0] in assets.names() or source in packaged.files()
    precision = "float32" if embedded and dtype == "auto" else dtype
    folder, options = checkpoints.place(source)
    try:
        with checkpoints.parsed(source):
            config = transformers.AutoConfig.from_pretrained(folder, **options)
            checkpoints.complete(source, config)
            _check_generative(whole, config, reads_sources)
            _check_tokenizer(whole, source)
            side = {} if kinds.reads_sources(config) else {"padding_side": "left"}
            tokenizer = _padded(AutoTokenizer.from_pretrained(folder, **side, **options))
            stored = checkpoints.is_quantised(source, config)
            quantised = checkpoints.opened(source, config, whole) if device.type == "cpu" else None
            if quantised is not None:
                model: Any = _with_integers(quantised, config, whole, source, precision)
            else:
                model = _with_weights(kinds.auto_class(config), folder, whole, dtype=precision, **options)
    except Refused:
        raise
    except Exception as e:  # a damaged folder makes the loaders raise any exception
        raise _unloadable(name, argument, source, e) from e
    model = model.to(device).eval()
    if kind_by(config.to_dict()) == "text":
        every = isinstance(source, Path) and checkpoints.is_gguf(source)
        _complete(model, tokenizer, config, every, whole if stored and not kinds.reads_sources(config) else None)
    return _finished(model, quantize), tokenizer


def _complete(model: Any, tokenizer: Any, config: Any, every: bool = False, checked: str | None = None) -> None:
    """Give a model the ends of its texts, see `ends.complete`, and a decoder's quantised one a check of its
    predictions, under the name `checked`."""
    ends.complete(model, tokenizer, config, every)
    if checked is not None:
        from truedraft.runtime.checkpoints.sanity import check_predictions

        check_predictions(model, tokenizer, checked)


def _with_adapter(
    folder: Path, name: str, dtype: str, quantize: str | None, argument: str, reads_sources: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that an adapter of PEFT names, with the adapter merged into its weights where these are plain."""
    from transformers import AutoTokenizer, GenerationConfig

    whole, base = f"{argument} {name!r}", _base_of(folder, name, argument)
    adapters.check_installed(whole)
    from peft import PeftModel

    model, tokenizer = load(base, dtype, None, f"{whole}: its base model", reads_sources)
    try:
        if _has_tokenizer(folder):
            options: dict[str, Any] = dict(config=model.config, padding_side=tokenizer.padding_side)
            tokenizer = _padded(AutoTokenizer.from_pretrained(folder, **options))
        wrapped: Any = PeftModel.from_pretrained(model, str(folder)).eval()
        layered = unwrapped(wrapped)
        plain = not any(hasattr(parameter, "qdata") for parameter in model.parameters())
        made = wrapped.merge_and_unload(safe_merge=True) if plain else layered
    except Refused:
        raise
    except Exception as e:  # a damaged folder makes the loaders raise any exception
        raise _unloadable(name, argument, folder, e) from e
    with contextlib.suppress(OSError):  # it has none
        made.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    ends.complete(made, tokenizer, made.config)
    return _finished(made, quantize), tokenizer


def _finished(model: Any, quantize: str | None) -> Any:
    """A model after its weights were quantised, where that is requested; the others may be replaced by the copies that
    compiled passes read."""
    from truedraft.runtime.releasing import may_release

    if quantize is not None:
        from truedraft.runtime.quantize import quantize as quantized

        quantized(model, quantize)
    may_release(model)
    return model


def _padded(tokenizer: Any) -> Any:
    """A tokenizer that pads with its end token where it has no other."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _base_of(folder: Path, name: str, argument: str) -> str:
    """The name of the model that an adapter belongs to, on the device that the adapter's own name ends with."""
    _, device = split(name)
    base = adapters.base_of(folder, f"{argument} {name!r}")
    return base if device is None else f"{base}@{device}"


def model_of(source: Path | str, name: str, argument: str) -> Path | str:
    """Where the weights of a model are: of an adapter, those of the model that it names.

    Raises:
        Refused: as `source_of`.
    """
    while isinstance(source, Path) and adapters.is_adapter(source):
        source = source_of(adapters.base_of(source, f"{argument} {name!r}"), f"{argument} {name!r}: its base model")
    return source


def _named(dtype: str | torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(name: str, dtype: str = "auto", quantize: str | None = None, argument: str = "MODEL") -> Path | str:
    """The checks of `load` that need no imports; returns the folder, or the name for the hub.

    Raises:
        Refused: no such model, dtype or kind of weights, or a folder without a model.
    """
    if dtype not in DTYPES:
        raise Refused(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    if quantize is not None and quantize not in QUANTIZED:
        raise Refused(f"--quantize {quantize}: choose one of {', '.join(QUANTIZED)}")
    return source_of(name, argument)


def split(name: str) -> tuple[str, str | None]:
    """A model's name, and the device that it ends with, as in NAME@cuda:1; None where it is a folder or names none."""
    found = None if Path(name).expanduser().exists() else DEVICE.fullmatch(name)
    return (found[1], found[2]) if found else (name, None)


def device_of(name: str, argument: str = "MODEL") -> torch.device:
    """The device to which a model of this name is loaded.

    Raises:
        Refused: torch finds no such device.
    """
    import torch

    plain, given = split(name)
    if given is None:
        given = "cuda" if torch.cuda.is_available() and plain not in assets.names() else "cpu"
    try:
        return torch.empty(0, device=given).device
    except Exception as e:  # of another class for every kind of device
        raise Refused(f"{argument} {name!r}: torch finds no device {given} here; give {plain}@cpu") from e


def kind_of(source: Path | str) -> Kind:
    """The kind of a model by its folder; names on the hub are only known once they are loaded, and are "text" here."""
    if not isinstance(source, Path) or not (source / "config.json").is_file():
        return "text"
    return kind_by(json.loads((source / "config.json").read_bytes()))


def kind_by(config: Mapping[str, Any]) -> Kind:
    """The kind of a model by what its configuration has."""
    if config.get("model_type") in SUBSETS:
        return "subset"
    return "canvas" if declares(config) else "text"


def tokenizer_of(model: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the files that a model was loaded from, where it has these and they are on this machine."""
    name = str(getattr(model.config, "name_or_path", ""))
    if not name:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception:  # a folder without a tokenizer makes the loader raise any exception
        return None


def load_tokenizer(name: str, argument: str = "--tokenizer") -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or one in a folder of its own; a folder with GPT-2's two files is enough.

    Args:
        argument: the argument's name in messages.

    Raises:
        Refused: no such tokenizer, or a damaged one.
    """
    source = source_of(name, argument, whole=False)
    if isinstance(source, Path) and not _has_tokenizer(source):
        source = model_of(source, name, argument)
    folder, options = checkpoints.place(source)
    from transformers import AutoTokenizer, GPT2Tokenizer

    kind: Any = AutoTokenizer
    try:
        files = {file.name for file in folder.iterdir()} if source is folder and isinstance(folder, Path) else set()
        if "merges.txt" in files and not files & {"config.json", "tokenizer_config.json", "tokenizer.json"}:
            kind = GPT2Tokenizer
        with checkpoints.parsed(source):
            return kind.from_pretrained(folder, **options)
    except Exception as e:  # a damaged folder makes the loaders raise any exception
        raise _unloadable(name, argument, source, e) from e


def config_of(source: Path | str, name: str, argument: str) -> Any:
    """The configuration of a model.

    Args:
        name, argument: as in `load`.

    Raises:
        Refused: there is no such model, or it is damaged.
    """
    import transformers

    folder, options = checkpoints.place(source)
    try:
        with checkpoints.parsed(source):
            config = transformers.AutoConfig.from_pretrained(folder, **options)
        checkpoints.complete(source, config)
    except Refused:
        raise
    except Exception as e:  # a damaged folder makes the loader raise any exception
        raise _unloadable(name, argument, source, e) from e
    return config


def _with_integers(checkpoint: Checkpoint, config: Any, model: str, source: Path | str, dtype: str) -> PreTrainedModel:
    """A model whose linear layers have the integers of a quantised checkpoint."""
    import torch
    from transformers import GenerationConfig

    from truedraft.runtime.released import trim

    with torch.device("meta"):
        empty = kinds.auto_class(config).from_config(config)
    if dtype == "auto":
        dtype = precision_of(source, config)
    tensors = checkpoint.tensors(empty, getattr(torch, dtype))
    loaded = _with_weights(type(empty), None, model, config=config, state_dict=tensors, dtype=getattr(torch, dtype))
    plain = checkpoint.finished(loaded)
    trim()
    if plain:
        warnings.warn(f"{model}: {_some(plain)} could not stay integers and take the memory of plain weights", Note, 3)
    loaded.config.name_or_path = str(source)
    with contextlib.suppress(OSError):  # it has none
        loaded.generation_config = GenerationConfig.from_pretrained(source, local_files_only=isinstance(source, Path))
    return loaded


def names_no_dtype(source: Path | str) -> bool:
    """Whether the dtype of a model's activations is chosen here, by what decodes fastest: that of a file of GGUF which
    no package has."""
    return isinstance(source, Path) and checkpoints.is_gguf(source) and source not in packaged.files()


def precision_of(source: Path | str, config: Any) -> str:
    """The dtype of a quantised checkpoint's activations, where the caller names none: that of its configuration, or
    float32 for float16; of a file of GGUF bfloat16 where products are those of integers, else float32."""
    import torch

    from truedraft.runtime import native

    fast = names_no_dtype(source) and native.takes_blocks()
    return "bfloat16" if fast or config.dtype == torch.bfloat16 else "float32"


def _with_weights(kind: Any, source: Path | str | None, model: str, **options: Any) -> PreTrainedModel:
    """A model whose weights are all from its checkpoint: `from_pretrained` would initialise missing ones at random."""
    try:
        loaded, info = kind.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except RuntimeError as e:
        if not (unconverted := _unconverted(e)):
            raise
        raise Refused(f"{model}: its checkpoint cannot be converted to {_some(unconverted)}: {REMEDY}") from e
    shapes = [f"{n} is {_shape(found)}, not {_shape(expected)}" for n, found, expected in info["mismatched_keys"]]
    faults = {"lacks": info["missing_keys"], "has, in other shapes,": shapes}
    if any(faults.values()):
        described = " and ".join(f"{fault} {_some(names)}" for fault, names in faults.items() if names)
        raise Refused(f"{model}: its checkpoint {described}: {REMEDY}")
    if unused := info["unexpected_keys"]:
        text = f"{model}: its checkpoint has {_some(unused)} that {type(loaded).__name__} does not use"
        warnings.warn(text, Note, stacklevel=3)
    return loaded


def _unconverted(error: Exception) -> Collection[str]:
    """Names of the weights that could not be converted from a checkpoint's tensors: `transformers` only logs them."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if (found := getattr(frame.f_locals.get("loading_info"), "conversion_errors", None)) is not None:
            return found
    return ()


def _some(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:NAMED])
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{len(names):,} {'tensor' if len(names) == 1 else 'tensors'} ({first}{more})"


def _shape(shape: Collection[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _unloadable(name: str, argument: str, source: Path | str, error: Exception) -> Refused:
    from transformers.utils.import_utils import is_protobuf_available

    where = "" if isinstance(source, Path) else " (no such folder here, so it was looked up on the hub)"
    reason = " ".join(why(error).strip().partition("\n")[0].split())
    if isinstance(error, ImportError):
        reason = reason.partition(". ")[0]
        if "sentencepiece" in reason.lower():
            reason += "; pip install 'truedraft[translate]'"
    if "tiktoken" in reason and not is_protobuf_available():
        reason = "its tokenizer is a SentencePiece model, which transformers reads by protobuf; pip install protobuf"
    return Refused(f"{argument} {name!r} cannot be loaded{where}: {reason}")


def source_of(name: str, argument: str, whole: bool = True) -> Path | str:
    """The folder of a model's name, or its file of GGUF, or the name itself for the hub; of a packaged model its file.

    whole: the folder must contain a model.

    Raises:
        Refused: there is no such folder, or no model in it.
    """
    name, _ = split(name)
    if not name:
        raise Refused(f"{argument} is empty: give a folder, a .gguf file, a name on the hub, or an embedded model")
    if name in assets.names():
        return assets.path(name)
    folder = Path(name).expanduser()
    if name in packaged.MODELS and not folder.exists():
        return packaged.path(name)
    if folder.exists():
        if whole and adapters.is_adapter(folder):
            model_of(folder, name, argument)
        elif whole and not checkpoints.is_gguf(folder):
            _check_config(folder, f"{argument} {name!r} is no model of transformers")
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise Refused(f"{argument} {name!r} does not exist")
    known = [*assets.names(), *packaged.MODELS]
    if "/" not in name and (near := difflib.get_close_matches(name, known, n=1, cutoff=0.75)):
        raise Refused(f"there is no embedded model {name!r}: did you mean {near[0]!r}?")
    return name


def _check_config(folder: Path, no_model: str) -> None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except ValueError as e:
        raise Refused(f"{no_model}: its config.json is no JSON") from e
    except OSError as e:
        raise Refused(f"{no_model}: it has no config.json") from e
    if not isinstance(config, dict):
        raise Refused(f"{no_model}: its config.json is no JSON object")


def _check_tokenizer(model: str, source: Path | str) -> None:
    """Raises Refused where a folder has none: the messages of transformers are unclear there."""
    if isinstance(source, Path) and source.is_dir() and not _has_tokenizer(source):
        raise Refused(f"{model} has no tokenizer: save it in the model's folder, tokenizer.save_pretrained(folder)")


def _has_tokenizer(folder: Path) -> bool:
    return any(found for name in TOKENIZERS for found in folder.glob(name))


def _check_generative(model: str, config: Any, reads_sources: str | None) -> None:
    """Raises Refused where the checkpoint is of another kind, which classes of causal models would load too."""
    import transformers

    suitable = "a decoder language model or an encoder-decoder" if reads_sources is None else "an encoder-decoder"
    for architecture in config.architectures or ():
        cls = getattr(transformers, architecture, None)
        if cls is not None and not cls.can_generate():
            raise Refused(
                f"{model} is not generative: it is a {architecture}, which has no language-model head; give {suitable}"
            )
    if reads_sources is not None and not kinds.reads_sources(config):
        raise Refused(
            f"{model} is a decoder language model, and {reads_sources} needs an encoder-decoder: give one, or use "
            "`truedraft generate`"
        )
