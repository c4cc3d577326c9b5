"""A proxy of a model: it has the model's attributes and methods, so that scripts and pipelines for the model run."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from truedraft.errors import Refused
from truedraft.stats import Report


class StandIn:
    """A proxy of `model`: attributes that it does not have itself are read from the model, and set on it.

    Nothing is copied: `config`, `generation_config`, `device`, `forward`, `num_parameters` ... are the model's own.
    Methods of the model that return the model (`to`, `eval`, `half` ...) return this instead. `isinstance` and
    `__class__` give the model's class, `type` does not.

    _own: names of its own attributes; None until it is complete.
    """

    model: PreTrainedModel
    _report: Report | None = None
    _own: frozenset[str] | None = None

    def _complete(self) -> None:
        """End the set of own attributes: those set later belong to the model."""
        self._own = frozenset(vars(self))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(vars(self)["model"]) if "model" in vars(self) else type(self)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """A call: there is no report until it makes one, which then has the time of the whole call."""
        self._report, began = None, time.perf_counter()
        try:
            yield
        finally:
            if self._report is not None:
                self._report.seconds["call"] = time.perf_counter() - began

    def report(self) -> Report:
        """Figures of the last call of `generate`; `tokens` are the new ones, up to the ends of the texts.

        Raises:
            Refused: there was no call yet.
        """
        if self._report is None:
            raise Refused("there is nothing to report: call generate() first")
        return self._report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without drafts."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "model" not in vars(self) or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.model, name)
        return self._returning(value) if getattr(value, "__self__", None) is self.model else value

    def _returning(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the model that returns this object instead of the model."""

        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self if result is self.model else result

        return called

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the model's attributes on the model, and own attributes here.

        Raises:
            Refused: neither has such an attribute, or it is the model itself.
        """
        if self._own is not None and name == "model":
            raise Refused("model cannot be replaced in an accelerated model: accelerate() the other one")
        if self._own is None or name in self._own or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        elif hasattr(self.model, name):
            setattr(self.model, name, value)
        else:
            near = difflib.get_close_matches(name, dir(self), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise Refused(
                f"{name}: neither {type(self.model).__name__} nor what accelerates it has such an attribute, and new "
                f"ones are set on .model itself{hint}"
            )

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *dir(type(self)), *dir(self.model)})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused(
            f"an accelerated {type(self.model).__name__} cannot be pickled or copied in part: its passes are made for "
            "this process; save .model, and accelerate() it where it is loaded"
        )


def renewed(given: Any, memo: dict[int, Any]) -> Any:
    """A new drafter, rule or control for a copy: the same knobs, without learnt state.

    memo: of `copy.deepcopy`.

    Raises:
        Refused: it cannot be created from its fields.
    """
    if given is None or isinstance(given, str | nn.Module):
        return copy.deepcopy(given, memo)
    if not dataclasses.is_dataclass(given):
        raise Refused(
            f"copy.deepcopy: a new {type(given).__name__} cannot be made from this one: accelerate() a deep copy of "
            ".model with another"
        )
    return dataclasses.replace(given)  # type: ignore[type-var]
