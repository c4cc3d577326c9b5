"""The tables of a benchmark, for terminal and HTML page: headings with explanations, figures as text."""

from __future__ import annotations

from collections.abc import Sequence

from truedraft.bench.compare import Figures
from truedraft.bench.lossy import Quality
from truedraft.bench.oracle import Attained
from truedraft.bench.replay import Replayed
from truedraft.bench.roofline import Machine, RooflinePoint
from truedraft.layout import Column, Table, grouped

CONFIDENT = 6  # rounds from which on the extremes contain the median with 95 % confidence
WAY = "how the text was generated: by the model alone, the first one, or by truedraft with this drafter"
AS_MODEL = (
    "whether every token is that of the model alone, the first line; else how many texts have another. Where rounding "
    "cannot explain that there is no speed-up"
)
AS_UNDRAFTED = (
    "whether every token is that of plain decoding through the same passes, the line `no drafts`: drafts may never "
    "change any"
)
AGREEMENT = (
    "share of the tokens that are those of the model alone at the same place; behind the first other one few are"
)
KINDS = {
    "tie": "{} at near-ties, which the rounding of this dtype decides",
    "numerics": "{} within the errors of the logits",
    "bug": "{} by a bug",
    "lossy": "{} by choice, under a lossy view",
    "sampled": "{} sampled, which are not classified",
    "unclassified": "{} not classified",
}
SPEED_UP = "time of the model alone over the time of this way, in the same round: 2.00x is twice as fast"
TOKENS_PER_SECOND = "new tokens per second, prompts' own passes included in the time"
PASSES = "forward passes of the model; of autoregressive ones those over prompts included"
LOSSY = "Lossy: another text than the model's own, by choice"
ACCEPTED = "mean acceptance length: emitted tokens per pass, the bonus token included; plain decoding has 1"


def label(f: Figures) -> str:
    """The heading of a comparison: workload, batch and sampling."""
    return f"{f.workload}, batch {f.batch}, {'greedy' if f.temperature == 0 else f'temperature {f.temperature:g}'}"


def interval(f: Figures) -> str:
    """The interval of the speed-up; empty for a single round and for plain transformers itself."""
    if f.speed_up is None or f.speed_up[1] == f.speed_up[2]:
        return ""
    return f"{f.speed_up[1]:.2f}-{f.speed_up[2]:.2f}"


def speed(figures: Sequence[Figures], rounds: int) -> Table[Figures]:
    """The table of equality and speed. `rounds`: number of rounds measured."""
    spread = "95 % interval of its median" if rounds >= CONFIDENT else f"slowest and fastest of {rounds} rounds"
    columns: list[Column[Figures]] = [
        Column("way", WAY, lambda f: f.side),
        Column(
            "as the model", AS_MODEL, lambda f: "yes" if f.as_model else f"{sum(f.apart.values())} of {f.texts} not"
        ),
        Column("as no drafts", AS_UNDRAFTED, _as_undrafted),
        Column("agreement", AGREEMENT, lambda f: "" if f.as_model else f"{f.agreement:.0%}"),
        Column("speed-up", SPEED_UP, lambda f: "" if f.speed_up is None else f"{f.speed_up[0]:.2f}x"),
        Column("from-to", f"of the speed-up: {spread}", interval),
        Column("tokens/s", TOKENS_PER_SECOND, lambda f: f"{f.tokens_per_second:.0f}"),
        Column("passes", PASSES, lambda f: str(f.passes or "")),
        Column("tokens/pass", ACCEPTED, lambda f: _decimals(f.mean_acceptance_length)),
        Column("drafting", "share of the time spent drafting", lambda f: _percent(f.draft_share)),
        Column("by drafts", "speed-up over the same engine without drafts", lambda f: _decimals(f.against_no_drafts)),
        Column("of at most", "upper bound of this, if only passes took time", lambda f: _decimals(f.bound)),
    ]
    return Table(f"Speed, {medians(rounds)}", columns, grouped(figures, label))


def _as_model(f: Figures) -> str:
    return "yes" if f.as_model else f"{sum(f.apart.values())} of {f.texts} not"


def _as_undrafted(f: Figures) -> str:
    return "" if f.as_undrafted is None else "yes" if f.as_undrafted else "NO"


def faults(figures: Sequence[Figures]) -> list[str]:
    """Sentences below the tables on what must not be: tokens that differ from those of the reference."""
    return [f"{label(f)}, {f.side}: {f.differs}" for f in figures if f.differs is not None]


def notes(figures: Sequence[Figures]) -> list[str]:
    """Sentences below the tables: texts that differ from the model's own, and prompts that were shortened."""
    cut = {f.workload: f.cut for f in figures if f.cut}
    return [
        *(f"{label(f)}, {f.side}: {_apart(f)}" for f in figures if f.apart and f.differs is None),
        *(
            f"{name}: {count} prompts are longer than the model's context allows; their ends were read."
            for name, count in cut.items()
        ),
    ]


def _apart(f: Figures) -> str:
    kinds = ", ".join(KINDS[kind].format(count) for kind, count in f.apart.items())
    return f"{sum(f.apart.values())} of {f.texts} texts differ from those of the model alone: {kinds}."


def latency(figures: Sequence[Figures], rounds: int) -> Table[Figures]:
    columns: list[Column[Figures]] = [
        Column("way", "", lambda f: f.side),
        Column("first token ms", "from the call to the first new token", lambda f: _ms(f.time_to_first_token)),
        Column("ms/token", "time per token after the first, on average", lambda f: _ms(f.time_per_output_token)),
        Column(
            "gap median ms",
            "between a token and the one before; tokens of one pass come together",
            lambda f: _ms(f.inter_token_latency and f.inter_token_latency[0]),
        ),
        Column(
            "gap 95 % ms",
            "95 of 100 gaps are no longer than this",
            lambda f: _ms(f.inter_token_latency and f.inter_token_latency[1]),
        ),
        Column(
            "memory MB", "largest resident memory of the process, all ways in one", lambda f: str(f.peak_memory >> 20)
        ),
    ]
    return Table(f"Latency, {medians(rounds)}", columns, grouped(figures, label))


def with_oracle(attained: Sequence[Attained]) -> Table[Attained]:
    """Speed-ups with drafts accepted at a set rate."""
    columns: list[Column[Attained]] = [
        Column("workload", "", lambda a: a.workload),
        Column("right", "probability with which a drafted token is the true one", lambda a: f"{a.rate:g}"),
        Column("drafted", "tokens drafted per pass", lambda a: str(a.drafted)),
        Column("tokens/pass", ACCEPTED, lambda a: _decimals(a.mean_acceptance_length)),
        Column("theory", "speed-up over no drafts if only passes took time", lambda a: f"{a.theory:.2f}x"),
        Column("attained", "speed-up over no drafts, measured", lambda a: f"{a.attained:.2f}x"),
        Column("share", "attained, of what theory allows", lambda a: _percent(a.share)),
    ]
    return Table("Oracle drafts, each token right with a set probability", columns, {"": attained})


def lossy(figures: Sequence[Figures], found: Sequence[Quality]) -> Table[tuple[Figures, Quality]]:
    """Views that the model generates under: quality beside speed."""
    of = {(quality.workload, quality.side): quality for quality in found}
    rows = [(f, of[f.workload, f.side]) for f in figures]
    columns: list[Column[tuple[Figures, Quality]]] = [
        Column("way", "the whole model, or a view that it generates under, with drafts or none", lambda r: r[0].side),
        Column("perplexity", "of the second halves of the texts, behind the first", lambda r: f"{r[1].perplexity:.3f}"),
        Column(
            "agreement",
            "share of these tokens at which its likeliest token is the whole model's",
            lambda r: f"{r[1].agreement:.1%}",
        ),
        Column("scored", "tokens of these halves", lambda r: str(r[1].tokens)),
        Column("behind", "mean number of tokens before them", lambda r: f"{r[1].behind:.0f}"),
        Column("tokens/s", TOKENS_PER_SECOND, lambda r: f"{r[0].tokens_per_second:.0f}"),
        Column("over whole", "speed over the whole model without drafts", lambda r: _decimals(r[0].against_no_drafts)),
        Column("tokens/pass", ACCEPTED, lambda r: _decimals(r[0].mean_acceptance_length)),
    ]
    return Table(LOSSY, columns, grouped(rows, lambda r: label(r[0])))


def roofline(rows: Sequence[RooflinePoint], machine: Machine) -> Table[RooflinePoint]:
    """Times of passes against the memory bandwidth and multiply rate of the machine."""
    columns: list[Column[RooflinePoint]] = [
        Column("width", "tokens that a pass scores at once", lambda r: str(r.width)),
        Column("measured ms", "time of a pass", lambda r: _ms(r.seconds)),
        Column(
            "over width 1",
            "time of the pass over that of a pass of one token",
            lambda r: f"{r.seconds / rows[0].seconds:.2f}x",
        ),
        Column(
            "floor ms", "the least that this machine needs to read the weights and multiply", lambda r: _ms(r.floor)
        ),
        Column("bound by", "which of the two takes longer", lambda r: r.bound),
        Column("attained", "the floor as a share of the time measured", lambda r: _percent(r.attained)),
    ]
    read, rate = f"{machine.bandwidth / 1e9:.0f} GB/s", f"{machine.rate / 1e9:.0f} {machine.precision} GFLOP/s"
    title = f"Latency of a pass by width; this machine reads {read} and multiplies {rate}"
    return Table(title, columns, {"": rows})


def free(rows: Sequence[RooflinePoint]) -> str:
    """The largest width at which a pass costs no more than reading the weights, as a sentence."""
    paid = next((row.width for row in rows if row.bound == "multiplying"), None)
    return f"Verification stops being free at width {paid}." if paid else "Verification is free at every width here."


def replayed(found: Sequence[Replayed], tokenizer: str) -> Table[Replayed]:
    """Drafters on recorded outputs."""
    columns: list[Column[Replayed]] = [
        Column("drafter", "", lambda f: f.way),
        Column("tokens/pass", ACCEPTED, lambda f: _decimals(f.mean_acceptance_length)),
        Column(
            "drafted/pass", "drafted tokens that a pass verifies, on average", lambda f: f"{f.drafted_per_pass:.1f}"
        ),
        Column("right", "share of the drafted tokens that were accepted", lambda f: _percent(f.accepted_share)),
        Column(
            "drafting µs/pass",
            "time that the drafter takes, in microseconds",
            lambda f: f"{f.drafting_microseconds:.0f}",
        ),
        Column("outputs", "recorded outputs", lambda f: str(f.outputs)),
        Column("tokens", "of these outputs", lambda f: str(f.tokens)),
        Column("passes", "of the model, that these would have taken", lambda f: str(f.passes)),
    ]
    name = tokenizer.rstrip("/").rpartition("/")[2]
    return Table(f"Replay, in tokens of {name}", columns, grouped(found, lambda f: f"{f.file}, {f.kind}"))


def medians(rounds: int) -> str:
    return "one round" if rounds == 1 else f"medians of {rounds} rounds"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
