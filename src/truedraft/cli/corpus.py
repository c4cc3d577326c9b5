"""`truedraft corpus`: builds corpora for lookup drafters from files, and checks them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from truedraft.cli._options import AsJson, Command
from truedraft.cli._text import waiting
from truedraft.errors import Refused
from truedraft.loading import source_of

app = Typer(
    help="Build a corpus for lookup drafters, or check one.", no_args_is_help=True,
    epilog="Example: truedraft corpus info project.tdc",
)  # fmt: skip


@app.command(
    cls=Command, epilog="Example: truedraft corpus build docs answers.jsonl.gz --tokenizer nano --out project.tdc"
)
def build(
    files: Annotated[list[Path], Argument(metavar="FILES...", help="Text or code: files, .jsonl, .gz, folders.")],
    tokenizer: Annotated[str, Option(help="Tokenizer of the target: nano, a folder, or a name on the hub.")],
    out: Annotated[Path, Option(help="The file to write.")],
    field: Annotated[str | None, Option(help="Field of .jsonl with the text; by default text or content.")] = None,
    force: Annotated[bool, Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build a corpus for drafters like `rest:corpus=FILE`. A document is a file, or a line of .jsonl.

    \f
    Raises Refused: there is no text, the tokenizer cannot be loaded, or the file cannot be written.
    """
    for file in files:
        if not file.exists():
            raise Refused(f"'{file}' is no file or folder")
    source_of(tokenizer, "--tokenizer", whole=False)
    with waiting("loading the tokenizer") as show:
        from truedraft.cli._models import load_tokenizer
        from truedraft.stores.building import build_corpus, check_writable

        check_writable(out, force)
        encode = load_tokenizer(tokenizer, "--tokenizer")
        built = build_corpus(files, encode, out, name=tokenizer, field=field, force=force, progress=show)
    if as_json:
        print(json.dumps(asdict(built), indent=2))
        return
    rate = built.tokens / built.seconds
    print(f"{built.path}: {built.tokens:,} tokens of {built.documents:,} documents")
    print(f"{built.bytes / 1e6:,.1f} MB, {built.bytes / built.tokens:.1f} bytes a token")
    print(
        f"{built.seconds:.1f} s, {built.tokenising:.1f} of them in the tokenizer; {rate:,.0f} tokens a second; "
        f"{built.peak_memory / 1e6:,.0f} MB of memory at most"
    )
    for why, count in built.skipped.items():
        print(f"skipped: {count:,} {why}")


@app.command(cls=Command, epilog="Example: truedraft corpus info project.tdc")
def info(file: Annotated[Path, Argument(metavar="FILE", help="A corpus.")], as_json: AsJson = False) -> None:
    """Read a corpus, check that it is complete, and print its contents.

    \f
    Raises Refused: the file is missing, damaged, or of another version.
    """
    with waiting("reading the corpus"):
        from truedraft.stores.corpus import Corpus

        corpus = Corpus.open(file)
    facts = {"path": str(file), **asdict(corpus.config), "bytes": file.stat().st_size, "whole": True}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print(f"{file}: whole; {facts['tokens']:,} tokens of {facts['documents']:,} documents")
    print(f"tokenizer {facts['tokenizer'] or 'unknown'} (fingerprint {facts['fingerprint'] or 'none'})")
    print(f"{facts['bytes'] / 1e6:,.1f} MB, {facts['bytes'] / max(facts['tokens'], 1):.1f} bytes a token")
