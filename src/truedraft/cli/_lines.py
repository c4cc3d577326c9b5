"""Files rewritten line by line: what `truedraft correct` and `truedraft translate` share."""

from __future__ import annotations

import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from typer import Argument, Option

from truedraft.cli._diff import coloured, marked
from truedraft.cli._models import accelerated
from truedraft.cli._options import check_names
from truedraft.errors import Note, Refused, why
from truedraft.files import check_file, whole
from truedraft.layout import labelled

if TYPE_CHECKING:
    from truedraft.accelerated import Accelerated
    from truedraft.text.lines import Rewriter, RewrittenLine, Tally

STDIN = "-"
CHUNK = 1 << 20

File = Annotated[str, Argument(metavar="FILE", help="Text in UTF-8; - reads standard input.")]
Out = Annotated[Path | None, Option(help="Write to this file atomically, not to standard output.")]
InPlace = Annotated[bool, Option("--in-place", help="Replace FILE by the result, atomically.")]
Prefix = Annotated[str, Option(help="Put before every source, for models that need a task prefix.")]
Batch = Annotated[int, Option(help="Sources per batch.")]
MaxNewTokens = Annotated[
    int | None, Option(help="Most tokens per source; by default twice its length plus 32, up to the model's limit.")
]
NumBeams = Annotated[int | None, Option(hidden=True)]
Check = Annotated[bool, Option("--check", help="Compare every source with model.generate; exit 1 if one differs.")]
Figures = Annotated[bool, Option("--report", help="Print the figures of the run on stderr.")]


@dataclass(frozen=True)
class ModelOptions:
    """A model and its drafting, by name; see `cli._models.accelerated`.

    check: whether the model's own generate is timed.
    """

    model: str
    argument: str
    command: str
    dtype: str
    quantize: str | None
    draft: str
    control: str
    threads: int | None
    check: bool = False

    def __post_init__(self) -> None:
        check_names(self.model, self.dtype, self.quantize, self.argument, drafts=[self.draft], control=self.control)

    def load(self) -> Accelerated:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*num_beams", Note
            )  # lines are decoded greedily, which is noted at the end
            return accelerated(
                self.model, self.dtype, self.draft, self.control, self.quantize,
                argument=self.argument, reads_sources=f"`truedraft {self.command}`", threads=self.threads,
                release_weights=False if self.check else None,
            )  # fmt: skip


@dataclass(frozen=True)
class TextPaths:
    """Input and output of a text.

    diff: show differences by words instead of the text; None does so on a terminal.
    """

    file: str
    out: Path | None
    in_place: bool
    diff: bool | None = False

    def __post_init__(self) -> None:
        if self.in_place and self.out is not None:
            raise Refused("--in-place and --out were both given: choose one")
        if self.in_place and self.file == STDIN:
            raise Refused("--in-place needs a FILE to replace, not standard input")
        if self.file == STDIN and sys.stdin is None:
            raise Refused("FILE -: standard input is closed; name a file")
        if sys.stdout is None and self.shown is not None:
            raise Refused("standard output is closed: give --out or --in-place")
        if self.target is not None:
            self._check(self.target)

    @property
    def target(self) -> Path | None:
        """The file to write; None for standard output."""
        return Path(self.file) if self.in_place else self.out

    @property
    def shown(self) -> bool | None:
        """What goes to standard output: differences (True), the text (False), or nothing (None)."""
        if self.target is not None:
            return True if self.diff else None
        return self.diff if self.diff is not None else sys.stdout is not None and sys.stdout.isatty()

    def _check(self, target: Path) -> None:
        """Raises Refused, before anything is computed, for a file that cannot be written, or is the input."""
        name = "--in-place" if self.in_place else f"--out {target}"
        if str(target) == STDIN:
            raise Refused("--out -: text goes to standard output where --out is left out")
        there = os.path.exists(target)  # False for a name that is none
        if there and not target.is_file():
            raise Refused(f"{name} is not a regular file: name another")
        if not self.in_place and there and Path(self.file).exists() and target.samefile(self.file):
            raise Refused(f"{name} is the input: give --in-place to replace it")
        check_file(target, name)

    def written(self) -> Any:
        """A context with the open output file, or None."""
        return nullcontext() if self.target is None else whole(self.target)


@dataclass
class LineReader:
    """Lines of a file or of standard input, with their line ends; `total` is their number, None where unknown.

    Bytes that are not UTF-8 are decoded to lone surrogates.

    Raises:
        Refused: the input cannot be read, or is not text.
    """

    file: BinaryIO
    name: str
    total: int | None = None

    def __post_init__(self) -> None:
        if stat.S_ISREG(mode(self.file)):
            start, self.total, last = self.file.tell(), 0, b""
            while chunk := self.file.read(CHUNK):
                self._refuse_binary(chunk, first=not last)
                self.total, last = self.total + chunk.count(b"\n"), chunk
            self.total += not last.endswith(b"\n") and last != b""
            self.file.seek(start)

    def __iter__(self) -> Iterator[str]:
        for i, line in enumerate(self.file):
            self._refuse_binary(line, first=i == 0)
            yield line.decode("utf-8", "surrogateescape")

    def _refuse_binary(self, data: bytes, first: bool) -> None:
        if first and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise Refused(f"{self.name} is UTF-16: convert it, for instance with iconv -f UTF-16 -t UTF-8")
        if b"\0" in data:
            raise Refused(f"{self.name} is not text in UTF-8: it contains NUL bytes")


def mode(file: BinaryIO) -> int:
    try:
        return os.fstat(file.fileno()).st_mode
    except OSError:  # no file descriptor
        return 0


@contextmanager
def opened(name: str) -> Iterator[LineReader]:
    """The lines of a file, or of standard input for `-`."""
    if name == STDIN:
        yield LineReader(sys.stdin.buffer, "standard input")
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open("rb"))
        except OSError as e:
            raise Refused(f"FILE {name}: {why(e)}") from e
        yield LineReader(file, f"FILE {name}")


def check_counts(batch: int, max_new_tokens: int | None, num_beams: int | None) -> None:
    """Raises Refused for a number out of range."""
    for name, value in (("--batch", batch), ("--max-new-tokens", max_new_tokens)):
        if value is not None and value < 1:
            raise Refused(f"{name} {value} must be at least 1")
    if num_beams not in (None, 1):
        raise Refused(f"--num-beams {num_beams}: drafts are verified against greedy search; leave it out")


def rewrite(
    paths: TextPaths,
    options: ModelOptions,
    fitted: Callable[[Accelerated], Mapping[str, Any]],
    report: bool,
    **knobs: Any,
) -> int:
    """Rewrite a file, once the options are checked.

    Args:
        fitted: returns settings of `generate` for the model, or refuses the model.
        knobs: those of `lines.Rewriter`.

    Returns the exit code: 0; 1 where a line differs from `model.generate`; 130 after Ctrl-C: an output file is then
    left unchanged, and standard output has the lines that were finished.
    """
    with opened(paths.file) as source:
        fast = options.load()
        from truedraft.text.lines import Rewriter

        with _progress(source.total, paths.shown is not None and sys.stdout.isatty()) as progress:
            rewriter = Rewriter(fast, settings=fitted(fast), progress=progress, **knobs)
            try:
                with paths.written() as out:
                    for line in rewriter.run(source):
                        _write(line, out, paths.shown)
            except KeyboardInterrupt:
                return _interrupted(rewriter.tally, paths.target)
            except OSError as e:
                if paths.target is None:
                    raise
                raise Refused(f"{paths.target} cannot be written: {why(e)}") from e
    return _summarised(rewriter, report)


def _write(line: RewrittenLine, out: BinaryIO | None, shown: bool | None) -> None:
    if out is not None:
        out.write(line.text.encode("utf-8", "surrogateescape"))
    if shown is False:
        sys.stdout.buffer.write(line.text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
    elif shown:
        _show(line)


def _show(line: RewrittenLine) -> None:
    """Write the differences of a line to standard output."""
    parts = [(printable(before), printable(after)) for before, after in line.parts]
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        if console.color_system is not None and not console.no_color:
            console.print(coloured(parts), end="", soft_wrap=True)
            return
    sys.stdout.buffer.write(marked(parts).encode())
    sys.stdout.buffer.flush()


def printable(text: str) -> str:
    """Printable text: bytes that are not UTF-8 become replacement characters."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@contextmanager
def _progress(total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal and lines are not streamed to it."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or shown:
        yield lambda lines: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("lines"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda lines: bar.update(task, completed=lines)


def _interrupted(tally: Tally, target: Path | None) -> int:
    state = f"{target} is unchanged" if target is not None else f"{tally.lines} lines were written"
    print(f"interrupted: {state}", file=sys.stderr)
    return 130


def _summarised(rewriter: Rewriter, report: bool) -> int:
    """Notes, figures and the comparison, on stderr; returns the exit code."""
    tally, write = rewriter.tally, lambda text: print(text, file=sys.stderr)
    for reason, noted in tally.notes.items():
        lines = ", ".join(map(str, sorted(noted.lines)))
        write(f"note: {noted.count:,} {'place' if noted.count == 1 else 'places'}, on lines {lines}: {reason}")
    own = rewriter.fast.model.generation_config
    if (own.num_beams or 1) > 1:
        write(f"note: this model's own settings search with {own.num_beams} beams; lines are decoded greedily")
    elif own.do_sample:
        write("note: this model's own settings sample; lines are decoded greedily")
    if report:
        write(_figures(tally))
    if not rewriter.check:
        return 0
    if tally.differs is None:
        write(f"identical: yes, {tally.pieces:,} of {tally.pieces:,} with model.generate")
        return 0
    d = tally.differs
    write(f"identical: no; line {d.line} first: model.generate gives {d.expected!r}, truedraft {d.got!r}")
    return 1


def _figures(tally: Tally) -> str:
    return labelled(_described(tally))


def _described(tally: Tally) -> Iterator[tuple[str, str]]:
    yield "lines", f"{tally.lines:,}, {tally.changed:,} of them changed"
    yield "sources", f"{tally.pieces:,} given to the model"
    if tally.report is None:
        return
    r, seconds = tally.report, max(tally.seconds, 1e-9)
    yield "drafter", r.drafter
    yield "rule", f"{r.rule} (guarantee: {r.guarantee})"
    yield "control", r.control
    yield "passes by", r.runtime
    yield "tokens", f"{tally.tokens:,} in {tally.passes:,} passes"
    each = f"{tally.row_passes / tally.pieces:.2f} passes, {tally.tokens / tally.row_passes:.2f} tokens per pass"
    yield "per source", each
    yield "speed", f"{tally.pieces / seconds:.1f} sources/s, {tally.tokens / seconds:.1f} tokens/s"
    if tally.plain_seconds:
        yield "", f"model.generate alone: {tally.pieces / tally.plain_seconds:.1f} sources/s"
