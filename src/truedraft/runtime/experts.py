"""Gives tokens fewer experts: in passes by the model's own forward, and in the operations of compiled ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from truedraft.errors import Refused
from truedraft.runtime.fingerprint import does_more
from truedraft.runtime.native import Op
from truedraft.runtime.overrides import Override, overridden
from truedraft.runtime.relu_routed import ReluRouted, relu_routed
from truedraft.runtime.tapping import one_token
from truedraft.views._base import Experts

TOP = ("top_k", "num_experts_per_tok")  # what routers call the number of experts of a token


class FewerExperts:
    """The mixtures of experts of a model, whose tokens a pass may give fewer of them.

    A mixture has a module `experts`, and is or has a router with a number of experts per token (TOP); or it is one of
    `relu_routed.py`. A forward over one token checks that experts are chosen by this number.

    Raises:
        Refused: there are no mixtures, they are of another kind, or they have hooks or replaced forwards.
    """

    def __init__(self, model: PreTrainedModel):
        self._name = type(model).__name__
        self._relu = [ReluRouted(module) for module in model.modules() if relu_routed(module)]
        self._mixtures = [module for module in model.modules() if _mixed(module)]
        self._routers = [r for mixture in self._mixtures for r in (mixture, *mixture.children()) if _top(r)]
        if any(map(does_more, [*self._routers, *(one.module for one in self._relu)])):
            raise self._refused("they have hooks or replaced forwards")
        if self._mixtures:
            self._check(model)

    def check(self, experts: Experts) -> None:
        """Raises Refused where a token is given no more than these."""
        check_fewer(self._name, experts, [_top(router) for router in self._routers], [len(r) for r in self._relu])

    def given(self, experts: Experts) -> AbstractContextManager[None]:
        """Within the block, this thread's calls of the model give tokens these experts at most."""
        relu = ((one.module, "forward", one.forward(experts)) for one in self._relu)
        return overridden([*self._fewer(experts.most), *relu])

    def _fewer(self, most: int) -> Iterator[Override]:
        for router in self._routers:
            yield router, "forward", _with_top(router, min(most, _top(router)))

    @torch.no_grad()
    def _check(self, model: Any) -> None:
        """Raises Refused where a forward over one token does not give it one expert, after `_fewer` said so."""
        counts: list[int] = []

        def noting(experts: Any) -> Callable[..., Any]:
            def forward(states: Any, chosen: Any, *args: Any, **kwargs: Any) -> Any:
                counts.append(chosen.shape[-1])
                return type(experts).forward(experts, states, chosen, *args, **kwargs)

            return forward

        noted = [(m.experts, "forward", noting(m.experts)) for m in self._mixtures]
        try:
            with overridden([*self._fewer(1), *noted]):  # type: ignore[list-item]
                model(input_ids=one_token(model), use_cache=False, return_dict=True)
        except (TypeError, AttributeError, RuntimeError, IndexError) as error:
            raise self._refused("they are not given tokens and the numbers of their experts") from error
        if counts != [1] * len(self._mixtures):
            raise self._refused("its routers do not choose by a number of experts per token")

    def _refused(self, why: str) -> Refused:
        return Refused(f"the experts of {self._name} cannot be fewer: {why}")


def fewer_in(op: Op, experts: Experts) -> Op:
    """An operation for tokens with these experts at most."""
    if not op.experts or op.top <= experts.most:
        return op
    copied = Op.from_buffer_copy(op)
    copied.top = experts.most
    return copied


def check_ops(name: str, ops: Sequence[Op], experts: Experts) -> None:
    """Raises Refused where no operation gives a token more experts than these, or none has experts."""
    check_fewer(name, experts, [op.top for op in ops if op.experts], [])


def shares(model: nn.Module, experts: Experts | None) -> dict[int, float]:
    """Of the weights of experts, by id, the share that a pass over one token reads; experts: those that it is given."""
    found: dict[int, float] = {}
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if relu_routed(module) and experts is not None:
            share = min(experts.most / module.router_proj.out_features, 1.0)
            found |= {id(weights): share for weights in (module.up_proj, module.down_proj)}
        elif _mixed(module) and (top := max(map(_top, (module, *module.children())))):
            given = top if experts is None else min(top, experts.most)
            found |= {id(weights): given / _count(module.experts) for weights in module.experts.parameters()}
    return found


def check_fewer(name: str, experts: Experts, tops: Sequence[int], active: Sequence[int]) -> None:
    """Raises Refused unless some token is given more experts than these.

    tops: of routers with a number of experts per token, this number.
    active: of routers that end in a ReLU, all of their experts.
    """
    if not tops and not active:
        raise Refused(f"{name} has no mixture of experts, of which a token could be given fewer")
    if experts.least and not active:
        raise Refused(
            f"least={experts.least:g}: the routers of {name} do not end in a ReLU, and give every token {max(tops)} "
            "experts: give experts=N alone"
        )
    if experts.most >= (most := max([*tops, *active])) and not experts.least:
        raise Refused(f"experts={experts.most}: the routers of {name} give a token {most} at most, give fewer")


def _mixed(module: nn.Module) -> bool:
    """Whether a module is a mixture of experts."""
    return isinstance(getattr(module, "experts", None), nn.Module)


def _count(experts: Any) -> int:
    """How many experts there are: as modules, or along the first dimension of their weights."""
    return len(experts) if isinstance(experts, nn.ModuleList) else len(next(experts.parameters()))


def _top(router: Any) -> int:
    """Experts that a router gives a token; 0 where it has no such number."""
    found = [vars(router)[name] for name in TOP if type(vars(router).get(name)) is int]
    return max(found, default=0)


def _with_top(router: Any, most: int) -> Callable[..., Any]:
    """A router's forward with another number of experts per token; its weights are read in place."""
    other = copy.copy(router)
    for name in TOP:
        if name in vars(other):
            vars(other)[name] = most
    return lambda *args, **kwargs: type(router).forward(other, *args, **kwargs)
