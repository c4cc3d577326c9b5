"""Drafters against recorded outputs: what would have been accepted while the model said this.

A drafter that calls no model needs none to be judged: how far its drafts agree with the recording is how far they
would have been accepted. So mean acceptance lengths for models of any size are measured here without them, by the
decode loop and the drafters that generate with a model. Greedy outputs tell of the greedy rule, sampled ones of the
seeded rule at their temperature, which accepts in the same way.

What a recording cannot tell: the logits, and what the model would have said behind a rejected node. Drafters that learn
from rejected nodes learn nothing from them here, and look worse than they are. The end-of-text token is not recorded.
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
    """A `Target` that has a recording in the place of a model, for one row at a time.

    At a node whose path agrees with the recording, the recorded next token alone is possible; elsewhere none is, and
    the likeliest is token 0, which is never right. `Scores` are valid until the next pass.

    Raises:
        Refused: something else of a model is asked for.
    """

    family: Family = "decoder"

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.taps = Taps()
        self._logits = torch.full((1, 0, vocabulary), -torch.inf)
        self._sure: tuple[list[int], list[int]] = ([], [])  # nodes whose next token is known, and these tokens
        self._output: Sequence[int] = ()
        self._emitted = 0  # tokens of the output until the pending one

    def __getattr__(self, name: str) -> Any:
        raise Refused(f"a replay has a recording in the model's place, which has no {name!r}")

    def play(self, output: Sequence[int]) -> None:
        """The next row says `output`."""
        self._output, self._emitted = output, 0

    def admit(self, prompts: Sequence[Prompt]) -> Scores:
        return Scores(self._spoken([self._emitted], 1), {}, [len(prompts[0]) - 1])

    def score(
        self, trees: Sequence[DraftTree], view: View | None = None, slots: Sequence[int] | None = None
    ) -> Scores:  # fmt: skip
        if view is not None:
            self.check_view(view)
        (tree,) = trees
        places = [self._emitted]  # of each node's next token in the output, -1 where nobody knows
        for token, parent in zip(tree.tokens[1:], tree.parent[1:], strict=True):
            place = places[parent]
            places.append(place + 1 if 0 <= place < len(self._output) and self._output[place] == token else -1)
        return Scores(self._spoken(places, len(tree)), {}, [0])

    def wait(self) -> None:
        """Nothing is under way."""

    def commit(self, paths: Sequence[Sequence[int]], first: int = 0) -> None:
        self._emitted += len(paths[0])

    def release(self, slot: int) -> None:
        """The row has said everything."""

    def _spoken(self, places: Sequence[int], width: int) -> Tensor:
        """(1, width, V) logits for these places in the output; one buffer, in which single entries change."""
        if width > self._logits.shape[1]:
            self._logits = torch.full((1, width, self.vocabulary), -torch.inf)
        entries = self._logits[0].numpy()  # the same memory, in which single entries are reached sooner
        entries[self._sure] = -torch.inf
        nodes = [node for node, place in enumerate(places) if 0 <= place < len(self._output)]
        self._sure = nodes, [self._output[places[node]] for node in nodes]
        entries[self._sure] = 0.0
        return self._logits[:, :width]


@dataclass(frozen=True)
class Replayed:
    """What a drafter would have done on the recorded outputs of one kind.

    way: the drafter, as it was named.
    passes: of the model, those over the prompts included.
    mean_acceptance_length: tokens per pass, bonus included.
    drafted_per_pass: nodes up for verification.
    accepted_share: of those, how many were right; None where none was drafted.
    drafting_microseconds: per pass, spent by the drafter: reading prompts, proposing, observing.
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
        draft: a drafter, or the name of one, which then begins with nothing learnt.
        budget: nodes drafted per pass; 0 stands for the drafter's own size.
        progress: told what is about to run.

    Returns:
        Figures for each kind of output, in the order in which the file has them.

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
    """Raises Refused for a drafter that cannot do with recorded text."""
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
    """The passes in which one output would have been said, from the engine that generates with a model."""
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
