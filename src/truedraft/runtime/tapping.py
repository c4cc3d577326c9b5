"""Records the hidden states of chosen layers while a model's own forward runs.

`output_hidden_states` would keep those of all layers, and lacks the last block's output before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from truedraft.errors import Refused
from truedraft.runtime.overrides import Override, overridden
from truedraft.runtime.text import decoder_of

CALL = "_call_impl"  # what calling a module runs: its forward, own or replaced, and its hooks

Record = Callable[[int, Tensor], None]


class LayerTaps:
    """The layers of a model's decoder, numbered as in `Taps`; a forward records some of them.

    A forward over one token checks that recorded layers are those of `output_hidden_states` and that the output head
    reads layer -1. Where the decoder's blocks are not found, layers are those of `output_hidden_states`, and the last
    block's output before the final norm is refused.

    Args:
        inputs: of a forward over one token, by default its id; for a model that reads more than tokens.

    Attributes:
        blocks: number of decoder blocks.

    Raises:
        Refused: the model's forward returns no hidden states, or none are found in its calls.
    """

    def __init__(self, model: PreTrainedModel, inputs: Mapping[str, Any] | None = None):
        self._model: Any = model
        self._inputs = {"input_ids": one_token(model)} if inputs is None else inputs
        self._name = type(model).__name__
        returned = self._returned()
        if returned[0].ndim > 3:
            raise Refused(several_streams(self._name))
        self.blocks = len(returned) - 1
        self._layers: Sequence[nn.Module] = blocks_of(model, self.blocks) or ()
        self._final = True
        if not (self._layers and self._equal(range(-1, self.blocks + 1))):
            self._layers = ()
            if not self._equal(range(-1, self.blocks)):
                raise Refused(f"the hidden states of {self._name} cannot be tapped: its modules are not called")
        self._final = self._read_by_head()

    @contextmanager
    def recording(self, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
        """Within the block, this thread's forward of the model records layers: layer -> (rows, width, H).

        Raises:
            Refused: there is no such layer, or it is not found.
        """
        states: dict[int, Tensor] = {}
        chosen: dict[int, list[int]] = {}  # k >= 0 or -1 -> as requested
        for layer in layers:
            chosen.setdefault(self.number(layer), []).append(layer)

        def record(number: int, state: Tensor) -> None:
            for layer in chosen.get(number, ()):
                states[layer] = state

        with overridden(self._overrides(chosen, record)):
            yield states

    def number(self, layer: int) -> int:
        """A layer as k >= 0 or -1.

        Raises:
            Refused: see `recording`.
        """
        number = layer_number(layer, self.blocks)
        if number == self.blocks and not self._layers:
            raise Refused(
                f"layer={layer}: the output of the last block of {self._name} is not found, give -1, that after the "
                "final norm"
            )
        if number == -1 and not self._final:
            raise Refused(
                f"layer={layer}: the output head of {self._name} reads no layer of its decoder, give 0 or more"
            )
        return number

    def _overrides(self, chosen: Iterable[int], record: Record) -> Iterator[Override]:
        if not self._layers:
            for module in {id(module): module for module in (self._model, self._model.base_model)}.values():
                yield _calling(module, _requesting, lambda out: _record_all(_states(out), chosen, record))
            return
        for i, block in enumerate(self._layers):
            if i + 1 in chosen or (i == 0 and 0 in chosen):
                yield self._block(i, block, record)
        if -1 in chosen:
            yield _calling(self._decoder, _ignored, lambda out: record(-1, _first(out)))

    def _block(self, i: int, block: nn.Module, record: Record) -> Override:
        def entered(args: Any, kwargs: Any) -> None:
            if i == 0:
                record(0, given(args, kwargs))

        return _calling(block, entered, lambda output: record(i + 1, _first(output)))

    @property
    def _decoder(self) -> Any:
        return decoder_of(self._model)

    def _equal(self, layers: Iterable[int]) -> bool:
        """Whether the layers of a forward are recorded, and equal to those that it returns."""
        with self.recording(layers) as states:
            returned = self._returned()
        return all(
            layer in states and (layer == self.blocks or _same(states[layer], returned[layer])) for layer in layers
        )

    def _read_by_head(self) -> bool:
        """Whether the input of the output head is layer -1, up to a factor; True where no head is called."""
        head = self._model.get_output_embeddings()
        read: list[Tensor] = []
        noting = [] if head is None else [_calling(head, lambda args, kwargs: read.append(args[0]), _ignored)]
        with self.recording((-1,)) as states, overridden(noting):
            self._returned()
        if not read or read[0].shape != states[-1].shape:
            return not read
        similarity = cosine_similarity(read[0].double().flatten(), states[-1].double().flatten(), 0)
        return bool(similarity > 1 - 1e-4)

    @torch.no_grad()
    def _returned(self) -> Sequence[Tensor]:
        """The `output_hidden_states` of a forward over one token."""
        states = _states(self._model(**self._inputs, use_cache=False, output_hidden_states=True, return_dict=True))
        if not states:
            raise Refused(f"the hidden states of {self._name} cannot be tapped: its forward returns none")
        return states


def several_streams(name: str) -> str:
    """Why no layer of a model is tapped whose blocks pass several hidden states to each other."""
    return f"the hidden states of {name} cannot be tapped: a layer has several of each token"


def one_token(model: Any) -> Tensor:
    """(1, 1) a token id on the model's device; not padding, whose embedding may be zero."""
    device = model.get_input_embeddings().weight.device
    return torch.full((1, 1), model.config.get_text_config(decoder=True).vocab_size // 2, device=device)


def layer_number(layer: int, blocks: int) -> int:
    """A layer of a decoder with this many blocks, as k >= 0 or -1.

    Raises:
        Refused: there is no such layer.
    """
    if not -blocks - 1 <= layer <= blocks:
        raise Refused(
            f"layer={layer}: give 0 (the embeddings) to {blocks} (after the last of the {blocks} blocks), or -1 "
            f"(after the final norm) to {-blocks - 1}, counted from the end"
        )
    return layer if layer >= -1 else layer + blocks + 1


def blocks_of(model: PreTrainedModel, count: int) -> list[nn.Module] | None:
    """The decoder blocks of a model that has `count`; None where they are not found."""
    decoder: Any = model.get_decoder()
    modules = [*decoder.modules(), *model.modules()]  # `get_decoder` does not find the blocks of every model
    lists = (module for module in modules if isinstance(module, nn.ModuleList) and len(module) == count)
    return next(map(list, lists), None)


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among a block's arguments."""
    return args[0] if args else kwargs["hidden_states"]


def _calling(module: nn.Module, entered: Callable[[Any, Any], None], left: Callable[[Any], None]) -> Override:
    """An override of a module's calls. entered: called with (args, kwargs) before; left: with its output, after."""
    own: Any = getattr(type(module), CALL)

    def call(*args: Any, **kwargs: Any) -> Any:
        entered(args, kwargs)
        output = own(module, *args, **kwargs)
        left(output)
        return output

    return module, CALL, call


def _ignored(*_: Any) -> None:
    pass


def _requesting(_: Any, kwargs: dict[str, Any]) -> None:
    kwargs["output_hidden_states"] = True


def _record_all(states: Sequence[Tensor], chosen: Iterable[int], record: Record) -> None:
    for number in chosen:
        record(number, states[number])


def _states(output: Any) -> Sequence[Tensor]:
    """The hidden states in a model's output, (rows, width, H) by layer."""
    return getattr(output, "hidden_states", None) or getattr(output, "decoder_hidden_states", None) or ()


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))
