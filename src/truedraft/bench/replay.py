"""Replays recorded outputs: measures how many drafted tokens would have been accepted, without running the model.

Drafts of a drafter that calls no model are accepted as far as they agree with the recorded output. So mean acceptance
lengths for models of any size are measured here without them, by the same engine and drafters that generate with a
model. Greedy outputs measure the greedy rule, sampled ones the seeded rule at their temperature, which accepts in the
same way.

A recording contains neither logits nor the continuations of rejected nodes. Drafters that learn from rejected nodes
learn nothing from them here, and are underestimated. The end-of-text token is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from truedraft import registry
from truedraft.bench.recordings import Recording, Recordings
from truedraft.chance import StreamNoise
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter
from truedraft.engine import Engine
from truedraft.errors import Refused
from truedraft.parts import drafter_of
from truedraft.request import Request
from truedraft.sampling import History, Laws
from truedraft.stats import Pass, Report
from truedraft.stopping import Stops
from truedraft.stopwatch import Stopwatch
from truedraft.targets.kinds import Family
from truedraft.tree import DraftTree, Prompt, Row, Scores, Taps
from truedraft.views._base import View


class ReplayTarget:
    """A `Target` with a recording instead of a model, for one row at a time.

    At a node whose path agrees with the recording, only the recorded next token is possible; elsewhere all logits are
    -inf, and the argmax is token 0, which is never right. `Scores` are valid until the next pass.

    Raises:
        Refused: an attribute that a recording does not have is read.
    """

    family: Family = "decoder"
    branching = True
    croppable = True
    carried = 0

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.taps = Taps()
        self._logits = torch.full((1, 0, vocabulary), -torch.inf)
        self._recorded: tuple[list[int], list[int]] = ([], [])  # nodes on the recorded path, their next tokens
        self._output: Sequence[int] = ()
        self._emitted = 0  # tokens of the output up to the pending one

    def __getattr__(self, name: str) -> Any:
        raise Refused(f"a replay has a recording in the model's place, which has no {name!r}")

    def play(self, output: Sequence[int]) -> None:
        """Set the output of the next row."""
        self._output, self._emitted = output, 0

    def admit(self, prompts: Sequence[Prompt]) -> Scores:
        return Scores(self._logits_at([self._emitted], 1), {}, [len(prompts[0]) - 1])

    def score(
        self, trees: Sequence[DraftTree], view: View | None = None, slots: Sequence[int] | None = None
    ) -> Scores:  # fmt: skip
        if view is not None:
            self.check_view(view)
        (tree,) = trees
        places = [self._emitted]  # index of each node's next token in the output; -1 where it is not recorded
        for token, parent in zip(tree.tokens[1:], tree.parent[1:], strict=True):
            place = places[parent]
            places.append(place + 1 if 0 <= place < len(self._output) and self._output[place] == token else -1)
        return Scores(self._logits_at(places, len(tree)), {}, [0])

    def wait(self) -> None:
        """Passes are synchronous."""

    def commit(self, paths: Sequence[Sequence[int]], first: int = 0) -> None:
        self._emitted += len(paths[0])

    def release(self, slot: int) -> None:
        """Nothing to free."""

    def _logits_at(self, places: Sequence[int], width: int) -> Tensor:
        """(1, width, V) logits for these indices of the output; one buffer, in which single entries are changed."""
        if width > self._logits.shape[1]:
            self._logits = torch.full((1, width, self.vocabulary), -torch.inf)
        entries = self._logits[0].numpy()  # the same memory; single entries are faster to set
        entries[self._recorded] = -torch.inf
        nodes = [node for node, place in enumerate(places) if 0 <= place < len(self._output)]
        self._recorded = nodes, [self._output[places[node]] for node in nodes]
        entries[self._recorded] = 0.0
        return self._logits[:, :width]


@dataclass(frozen=True)
class Replayed:
    """Figures of a drafter over the recorded outputs of one kind.

    way: the drafter, as it was named.
    passes: passes of the model, those over the prompts included.
    mean_acceptance_length: tokens per pass, bonus included.
    drafted_per_pass: drafted nodes verified per pass.
    accepted_share: share of those that were accepted; None where none was drafted.
    drafting_microseconds: time of the drafter per pass: reading prompts, proposing, observing.
    """

    file: str
    kind: str
    way: str
    outputs: int
    tokens: int
    passes: int
    mean_acceptance_length: float
    drafted_per_pass: float
    accepted_share: float | None
    drafting_microseconds: float


def replay(
    recordings: Recordings,
    draft: str | Drafter,
    budget: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Replayed]:
    """Run a drafter over all outputs of a file, in its order, so that what it learns from one serves the next.

    Args:
        draft: a drafter, or the name of one, which is then newly made.
        budget: nodes drafted per pass; 0 for the drafter's own size.
        progress: called with a description of what runs next.

    Returns:
        Figures for each kind of output, in the order of the file.

    Raises:
        Refused: an unknown name, or a drafter that needs a model.
    """
    way = draft if isinstance(draft, str) else type(draft).__name__
    drafter = drafter_of(draft)
    check_replayable(way, drafter)
    target = ReplayTarget(len(recordings.ids))
    drafter.bind(target)
    control: Control = registry.load("control", "fixed", nodes=budget)
    reports: dict[str, list[Report]] = {}
    for number, recording in enumerate(recordings.outputs, 1):
        progress(f"{recordings.name}: {way}, output {number} of {len(recordings.outputs)}")
        watch = Stopwatch()
        passes = list(replayed(recording, target, drafter, control, watch))
        report = Report(way, "greedy", "tokens", "fixed", "replay", passes=passes, seconds=watch.seconds)
        reports.setdefault(recording.kind, []).append(report)
    return [_figures(recordings.name, kind, way, found) for kind, found in reports.items()]


def check_replayable(way: str, drafter: Drafter) -> None:
    """Raises Refused for a drafter that needs more than recorded text."""
    lacking = [need for need in drafter.card.needs if need != "references"]
    if drafter.needs != Taps():
        lacking.append("hidden states")
    if lacking:
        raise Refused(
            f"{way} cannot be replayed: recordings are text alone, and it needs more ({', '.join(lacking)}); "
            "choose a drafter that calls no model"
        )


def replayed(
    recording: Recording, target: ReplayTarget, drafter: Drafter, control: Control, watch: Stopwatch
) -> Iterator[Pass]:
    """The passes that would have emitted one output, from the engine that generates with a model."""
    target.play(recording.output)
    documents = recording.references if drafter.takes_references else ()
    row = Row(0, list(recording.prompt), len(recording.prompt), len(recording.output), documents)
    prompt = torch.tensor([recording.prompt], dtype=torch.long)
    history = History(prompt, row.room, 0, [row])
    laws = Laws(LogitsProcessorList(), history)
    stops = Stops(StoppingCriteriaList([MaxLengthCriteria(row.prompt + row.room)]), history, laws)
    rule = registry.load("accept", "greedy")
    request = Request([row], [Prompt(prompt[0])], drafter, rule, laws, stops, StreamNoise(1), history)
    engine = Engine(target, control)
    watch.attach(engine)
    return engine.run(request)


def _figures(file: str, kind: str, way: str, reports: Sequence[Report]) -> Replayed:
    emissions = [e for report in reports for p in report.passes for e in p.emitted]
    tokens, passes = sum(len(e.tokens) for e in emissions), len(emissions)
    offered = sum(e.offered for e in emissions)
    drafting = sum(report.seconds["draft"] + report.seconds["observe"] for report in reports)
    return Replayed(
        file=file,
        kind=kind,
        way=way,
        outputs=len(reports),
        tokens=tokens,
        passes=passes,
        mean_acceptance_length=tokens / passes,
        drafted_per_pass=offered / passes,
        accepted_share=sum(e.drafted for e in emissions) / offered if offered else None,
        drafting_microseconds=drafting / passes * 1e6,
    )
