"""A datastore of nearest neighbours: a model's hidden state at every token of given texts, and the token that follows.

The nearest neighbours of states are found by one matrix product with all keys, which suits up to about a million
tokens: that many states of 1024 numbers are 4 GB, read once per pass. The caller chooses the texts: a first stage of
retrieval, by terms or by embeddings, is expected before.

States are scaled to a mean square of 1. Layers normalise their input, so the norm of a state predicts little of the
next token; and distances of such states have the same scale in all models, as a softmax needs it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from truedraft.card import shown
from truedraft.errors import Refused, why
from truedraft.runtime.tapping import LayerTaps, layer_number
from truedraft.stores import _file
from truedraft.tree import Row

KIND, VERSION, MAKER = "datastore", 2, "Neighbours.built(model, documents).save(path)"
PART = 1024  # tokens of a pass; in longer documents each token has at least half as many before it


@dataclass(eq=False)
class Neighbours:
    """States of a model in texts, and the tokens that follow.

    layer: of these states, numbered as in `Taps`.
    names: of the documents. starts: where each begins in `text`, and where the last one ends.
    text: (n,) token ids of all documents. keys: (m, H) states at all tokens but the last of each document.
    unchanged: called before the states are used; raises Refused where their file was changed.
    """

    layer: int
    names: tuple[str, ...]
    starts: tuple[int, ...]
    text: Tensor
    keys: Tensor
    unchanged: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if (
            self.text.ndim != 1
            or self.text.dtype != torch.long
            or self.keys.ndim != 2
            or not self.keys.is_floating_point()
        ):
            raise ValueError("its texts or states are of other kinds")
        ends = [0, *self.starts[1:-1], len(self.text)]
        if list(self.starts) != sorted(set(ends)) or len(self.names) != len(self.starts) - 1:
            raise ValueError("its documents have no beginning or no name")
        first = torch.zeros(len(self.text) + 1, dtype=torch.bool)
        first[list(self.starts)] = True
        self._next = (~first[:-1]).nonzero()[:, 0]  # index in `text` of the token after each key
        if len(self._next) != len(self.keys):
            raise ValueError(f"{len(self._next)} tokens follow others, and there are {len(self.keys)} states")

    @classmethod
    def built(cls, model: Any, documents: Iterable[tuple[str, Sequence[int]]], layer: int = -2) -> Neighbours:
        """States of documents, each read by itself.

        model: of `transformers`. documents: name and token ids of each.

        Raises:
            Refused: no such layer, a token outside the vocabulary, or no document of two tokens.
        """
        config = _check_layer(model, layer)
        taps = LayerTaps(model)
        names: list[str] = []
        starts, text, keys = [0], list[int](), list[Tensor]()
        for name, tokens in documents:
            if tokens and not 0 <= min(tokens) <= max(tokens) < config.vocab_size:
                raise Refused(
                    f"document {name!r} has token ids outside the model's vocabulary of {config.vocab_size}: give "
                    "those of this model's tokenizer"
                )
            if len(tokens) > 1:
                names.append(name)
                text += tokens
                starts.append(len(text))
                part = min(PART, getattr(config, "max_position_embeddings", PART))
                keys.append(_states(model, taps, tokens, layer, part))
        if not keys:
            raise Refused("there is nothing to look for neighbours in: give a document of two tokens or more")
        return cls(layer, tuple(names), tuple(starts), torch.tensor(text), torch.cat(keys))

    def save(self, path: str | PathLike[str]) -> None:
        """Write them whole or not at all.

        Raises:
            OSError: it cannot be written; an earlier file of that name is kept.
        """
        config = {"layer": self.layer, "names": self.names, "starts": self.starts}
        arrays = {"text": self.text.numpy(), "keys": self.keys.cpu().numpy()}
        _file.write(path, KIND, VERSION, config, arrays)

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Neighbours:
        """Neighbours from their file, mapped and checked.

        Raises:
            Refused: there is none, or it is damaged, or of another version.
        """
        config, arrays, unchanged = _file.read(path, KIND, VERSION, MAKER)
        try:
            layer, names, starts = config["layer"], tuple(config["names"]), tuple(config["starts"])
            if not all(isinstance(number, int) for number in (layer, *starts)):
                raise ValueError("its documents are not numbered")
            text, keys = torch.from_numpy(arrays["text"].copy()), torch.from_numpy(arrays["keys"])
            return cls(layer, names, starts, text, keys, unchanged)
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise Refused(f"{KIND} {str(path)!r} is damaged ({why(e)}): build it again") from e

    def compared(self, states: Tensor) -> Tensor:
        """(n, m) minus the squared distances of (n, H) states from all keys, over the root of H."""
        self.unchanged()
        if self.keys.device != states.device:
            self.keys = self.keys.to(states.device)
        size = self.keys.shape[1]
        return (_scaled(states) @ self.keys.T).sub_(size).clamp_max_(0).mul_(2 / size**0.5)

    def nearest(self, close: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest neighbours of a state, the nearest first: closeness, and index in `text` of the next token.

        close: (m,) of that state; see `compared`.
        """
        found = close.topk(min(k, len(close)))
        return found.values, self._next[found.indices.cpu()]

    def behind(self, place: int, length: int) -> list[int]:
        """At most `length` tokens from an index of `text` on, to the end of its document."""
        end = self.starts[bisect_right(self.starts, place)]
        return self.text[place : min(place + length, end)].tolist()

    def source(self, place: int) -> tuple[str, int]:
        """Name of the document of an index of `text`, and how many of its tokens come before."""
        which = bisect_right(self.starts, place) - 1
        return self.names[which], place - self.starts[which]


@dataclass(frozen=True, eq=False)
class Near:
    """The nearest neighbours of a state, and their next tokens.

    doubt: the weight of the model, the lambda of NEST, from the relative retrieval confidence.
    close: (k,) minus the squared distances, scaled. places: (k,) indices in the text of their next tokens, the nearest
        neighbour first.
    """

    store: Neighbours
    doubt: float
    close: Tensor
    places: Tensor

    def law(self, size: int) -> Tensor:
        """(size,) the next-token distribution of the neighbours."""
        tokens = self.store.text[self.places].to(self.close.device)
        return torch.zeros(size, device=self.close.device).index_add_(0, tokens, self.close.softmax(0))

    def saying(self, tokens: Sequence[int]) -> int | None:
        """The nearest neighbour followed by these tokens: the index in the text of the first of them."""
        for place in self.places[self.store.text[self.places] == tokens[0]].tolist():
            if self.store.behind(place, len(tokens)) == list(tokens):
                return place
        return None


class Search:
    """The search for neighbours and their weight, shared by drafter and rule.

    store: the datastore; None for the references of each row, whose states are computed at the first search.
    layer: of the states, numbered as in `Taps`, where there is no store. k: neighbours of a search.
    alpha, tau: the model's weight is sigmoid((r - alpha) / tau), r the similarity of the nearest neighbour over that of
        the farthest. A similarity is minus a squared distance: r is 0 to 1, small where one is much nearer.

    Raises:
        Refused: `store` is no datastore, or its file cannot be opened.
    """

    def __init__(self, store: Any, layer: int, k: int, alpha: float, tau: float):
        if store is not None and not isinstance(store, Neighbours | str | PathLike):
            raise Refused(f"store={shown(store)}: give Neighbours or their file")
        self.store: Neighbours | None = (
            store if store is None or isinstance(store, Neighbours) else Neighbours.open(store)
        )
        self.layer = layer if self.store is None else self.store.layer
        self.k, self.alpha, self.tau = k, alpha, tau

    def fit(self, model: Any) -> None:
        """Set the model whose states are searched for; called before the first search.

        Raises:
            Refused: the model has no such layer, or the store was made with another model.
        """
        config = _check_layer(model, self.layer)
        size, self._model = config.hidden_size, model
        if self.store is not None and (theirs := self.store.keys.shape[1]) != size:
            raise Refused(f"the neighbours' states have {theirs} numbers, the model's {size}: build them with it")
        vocabulary = config.vocab_size
        if self.store is not None and len(text := self.store.text) and not 0 <= text.min() <= text.max() < vocabulary:
            raise Refused(f"the neighbours' texts hold tokens that a model of {vocabulary} has not: build them with it")

    def has(self, row: Row) -> bool:
        """Whether there is any text to search for a row."""
        return self.store is not None or any(len(document) > 1 for document in row.references)

    def at(self, row: Row, states: Tensor) -> Callable[[int], Near] | None:
        """The neighbours of each of (n, H) states of a row, by its index; None where there is no text to search."""
        if not self.has(row):
            return None
        store = self.store or _of_references(self._model, row, self.layer)
        compared = store.compared(states)
        return lambda i: self._near(store, compared[i])

    def _near(self, store: Neighbours, compared: Tensor) -> Near:
        close, places = store.nearest(compared, self.k)
        nearest, farthest = close[[0, -1]].neg().tolist()
        ratio = nearest / farthest if farthest else 0.0
        return Near(store, float(torch.tensor((ratio - self.alpha) / self.tau).sigmoid()), close, places)


_MADE: WeakKeyDictionary[Row, dict[int, Neighbours]] = WeakKeyDictionary()  # by layer; shared by the rows of a call


def _of_references(model: Any, row: Row, layer: int) -> Neighbours:
    alike = (made for other, made in _MADE.items() if other.references is row.references)
    made = _MADE.setdefault(row, next(alike, {}))
    if layer not in made:
        documents = ((f"references[{i}]", document) for i, document in enumerate(row.references))
        made[layer] = Neighbours.built(model, documents, layer)
    return made[layer]


def _check_layer(model: Any, layer: int) -> Any:
    """The text configuration of a model that has this layer."""
    config = model.config.get_text_config(decoder=True)
    layer_number(layer, config.num_hidden_layers)
    return config


@torch.no_grad()
def _states(model: Any, taps: LayerTaps, tokens: Sequence[int], layer: int, part: int) -> Tensor:
    """(n - 1, H) states at the tokens of a document but the last, read `part` tokens at a time."""
    parts: list[Tensor] = []
    read, end = 0, len(tokens) - 1
    while read < end:
        first = max(read - part // 2, 0)
        last = min(first + part, end)
        ids = torch.tensor([tokens[first:last]], device=model.device)
        with taps.recording((layer,)) as states:
            model.base_model(ids, use_cache=False)
        parts.append(_scaled(states[layer][0, read - first :]))
        read = last
    return torch.cat(parts)


def _scaled(states: Tensor) -> Tensor:
    states = states.float()
    return states / states.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
