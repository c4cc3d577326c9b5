"""`truedraft export`: writes a learned drafter in the layout of a serving engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from truedraft import loading
from truedraft.errors import Refused
from truedraft.files import check_folder

ENGINES = ("vllm", "sglang")


def export(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The checkpoint of an eagle3 drafter.")],
    target: Annotated[str, Option(help="The model that it drafts for: a local folder, or a name on the hub.")],
    form: Annotated[str, Option("--format", help="vllm or sglang.")],
    out: Annotated[Path, Option(help="Folder to write.")],
) -> None:
    """Write an EAGLE-3 head as vLLM or SGLang load it.

    \f
    Raises Refused: there is no such checkpoint, it is of another target, or the layout has no place for it.
    """
    if form not in ENGINES:
        raise Refused(f"--format {form}: choose one of {', '.join(ENGINES)}")
    check_folder(out, f"--out {out}")
    if out.exists() and any(out.iterdir()):
        raise Refused(f"--out {out} is there already: name another folder")
    loading.check(target, argument="--target")
    from safetensors.torch import save_file

    from truedraft import registry
    from truedraft.drafters.heads._export import files_of
    from truedraft.files import replacing, write_whole
    from truedraft.targets.hosting import hosted

    model, _ = loading.load(target, argument="--target")
    draft: Any = registry.load("drafters", "eagle3", model=str(folder))
    draft.bind(hosted(model))
    config, weights = files_of(draft.head, form)
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / "model.safetensors") as part:
        save_file(weights, part, {"format": "pt"})
    write_whole(out / "config.json", json.dumps(config, indent=2) + "\n")
    print(f"{out}: the head of {folder} as {form} loads it")
