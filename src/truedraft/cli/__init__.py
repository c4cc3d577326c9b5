"""The command line: `truedraft generate`, `truedraft correct`, `truedraft translate`, `truedraft demo`,
`truedraft bench`, `truedraft audit`, `truedraft corpus`, `truedraft train`, `truedraft methods`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from truedraft.cli import audit, bench, corpus, correct, demo, generate, methods, train, translate
from truedraft.cli._streams import guarded
from truedraft.errors import Refused, why

app = typer.Typer(
    name="truedraft",
    help="Generation with transformers, several tokens per pass, exactly what the model alone would have said.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (
    generate.generate, correct.correct, translate.translate, demo.demo, bench.bench, audit.audit, train.train,
    methods.methods,
):  # fmt: skip
    app.command()(command)
app.add_typer(corpus.app, name="corpus")

WRITERS = ("correct", "corpus", "train", "translate")  # commands whose results may be files


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line, that of the process by default, and return its exit code.

    Expected errors (`Refused`, OSError, ValueError, a wrong option) become one line on stderr and code 2; Ctrl-C
    is 130; 141 is that nobody reads standard output any more.
    """
    given = list(sys.argv[1:] if args is None else args)
    return guarded(lambda: _run(given))


def _run(args: list[str]) -> int:
    try:
        if sys.stdout is None and not {*WRITERS} & {*args[:1]}:
            raise Refused("standard output is closed, where the result was to go: leave it open")
        code = app(args or ["--help"], prog_name="truedraft", standalone_mode=False, obj=args) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        raise
    except Exception as e:
        usage = getattr(e, "format_message", None)  # typer's own errors; their class moved between its versions
        if usage is None and not isinstance(e, OSError | ValueError):
            raise
        file = getattr(e, "filename", None)
        message = " ".join(f"{'' if file is None else f'{file}: '}{usage() if usage else why(e)}".split())
        print(f"error: {message}", file=sys.stderr)
        return 2
