"""The base of drafters made of others: methods that they do not override are called on each part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from truedraft.drafters._base import Drafter, PassCost
from truedraft.errors import Refused
from truedraft.stores.memory import Memory
from truedraft.tree import Row, Taps


class Joint(Drafter):
    """A drafter that drafts with others, its `parts`.

    Every method of `Drafter` without a result (`bind`, `start`, `observe`, `end` ...) is called on each part with the
    same arguments; subclasses that do more call `super()`. Attributes of parts are read at each access, so they may
    depend on what the part has loaded.

    parts: set once, before any other use.
    alternating: whether a draft is that of one part, as it is.
    """

    _parts: tuple[Drafter, ...]
    alternating: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self._parts

    @parts.setter
    def parts(self, parts: Sequence[Drafter]) -> None:
        self._parts = tuple(parts)
        for part in parts:
            part.alone = False

    @property
    def needs(self) -> Taps:  # type: ignore[override]
        return reduce(or_, (part.needs for part in self.parts), Taps())

    @property
    def takes_references(self) -> bool:  # type: ignore[override]
        return any(part.takes_references for part in self.parts)

    @property
    def autoregressive(self) -> bool:  # type: ignore[override]
        return any(part.autoregressive for part in self.parts)

    @property
    def reads_texts(self) -> bool:  # type: ignore[override]
        return any(part.reads_texts for part in self.parts)

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        return self.autoregressive and all(part.adaptive for part in self.parts if part.autoregressive)

    @property
    def overlapped(self) -> bool:  # type: ignore[override]
        return any(part.overlapped for part in self.parts)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:  # type: ignore[override]
        return next((part.tokenizer for part in self.parts if part.tokenizer is not None), None)

    @property
    def pass_cost(self) -> PassCost | None:
        return self._pass_cost

    @pass_cost.setter
    def pass_cost(self, cost: PassCost | None) -> None:
        self._pass_cost = cost
        for part in self.parts:
            part.pass_cost = cost

    _pass_cost: PassCost | None = None

    @property
    def notes(self) -> list[str]:
        return [note for part in self.parts for note in part.notes]

    @property
    def vocab_size(self) -> int | None:
        sizes = {part.vocab_size for part in self.parts if part.vocab_size is not None}
        if len(sizes) > 1:
            raise Refused(
                f"{self.name}: its parts have vocabularies of different sizes ({', '.join(map(str, sorted(sizes)))}): "
                "join parts that are made for one model"
            )
        return sizes.pop() if sizes else None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return type(self).__name__

    @property
    def attentive(self) -> bool:
        return True  # it counts passes

    def resumes(self, row: Row) -> bool:
        return any(part.resumes(row) for part in self._parts)

    def memories(self) -> Sequence[Memory]:
        return [memory for part in self.parts for memory in part.memories()]


def _of_each(name: str) -> Callable[..., None]:
    def call(self: Joint, *args: Any) -> None:
        for part in self.parts:
            getattr(part, name)(*args)

    call.__name__, call.__doc__ = name, getattr(Drafter, name).__doc__
    return call


for _name, _member in vars(Drafter).items():
    if inspect.isfunction(_member) and _member.__annotations__["return"] in (None, "None"):
        setattr(Joint, _name, _of_each(_name))
