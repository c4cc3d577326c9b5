"""Models of many languages, which want to be told from which to which."""

from __future__ import annotations

import difflib
from typing import Any

from truedraft.errors import Refused


def languages(model: Any, tokenizer: Any, source: str | None, target: str | None) -> dict[str, int]:
    """Have a tokenizer read one language, and return what `generate` wants to know to write another.

    Args:
        source, target: codes as the tokenizer writes them (`eng_Latn`, `en_XX`, `en`); None where the model has one.

    Raises:
        Refused: a code is given to a model of fixed languages, or missing, or unknown.
    """
    if not many(tokenizer):
        for option, code in (("--source-lang", source), ("--target-lang", target)):
            if code is not None:
                raise Refused(f"{option} {code}: this model's tokenizer has no language codes; leave the option out")
        return {}
    known = codes(tokenizer)
    own = model.generation_config
    fixed = {own.forced_bos_token_id, own.decoder_start_token_id} & set(known.values())
    if source is None or (target is None and not fixed):
        raise Refused("this model reads and writes many languages: give --source-lang and --target-lang")
    for option, code in (("--source-lang", source), ("--target-lang", target)):
        if code is not None and code not in known:
            near = difflib.get_close_matches(code, known, n=1, cutoff=0.3)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
            raise Refused(f"{option} {code!r} is no language of this model: {hint}")
    tokenizer.src_lang = source
    if target is None:
        forced = own.forced_bos_token_id
        return {"forced_bos_token_id": forced} if forced in fixed else {}
    begins = type(tokenizer).__name__.startswith("MBartTokenizer")  # the others begin with an end, then the language
    return {"decoder_start_token_id" if begins else "forced_bos_token_id": known[target]}


def check_monolingual(tokenizer: Any, command: str) -> None:
    """Raises Refused for a model that wants to be told languages by a command that does not."""
    if many(tokenizer):
        raise Refused(f"this model reads and writes many languages, and `{command}` names none: give it another model")


def many(tokenizer: Any) -> bool:
    """Whether a tokenizer can be told what language it reads (mBART, M2M100, NLLB)."""
    return isinstance(getattr(type(tokenizer), "src_lang", None), property)


def codes(tokenizer: Any) -> dict[str, int]:
    """Language code -> its token."""
    if found := getattr(tokenizer, "lang_code_to_id", None):
        return dict(found)
    extra = [token for token in tokenizer.all_special_tokens if token not in tokenizer.special_tokens_map.values()]
    return {token: tokenizer.convert_tokens_to_ids(token) for token in extra}
