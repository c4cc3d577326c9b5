"""Language codes of models that read and write several languages."""

from __future__ import annotations

import difflib
from typing import Any

from truedraft.errors import Refused


def languages(model: Any, tokenizer: Any, source: str | None, target: str | None) -> dict[str, int]:
    """Set a tokenizer's source language, and return the arguments of `generate` for the target language.

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
    by_code = codes(tokenizer)
    own = model.generation_config
    fixed = {own.forced_bos_token_id, own.decoder_start_token_id} & set(by_code.values())
    if source is None or (target is None and not fixed):
        raise Refused("this model reads and writes many languages: give --source-lang and --target-lang")
    for option, code in (("--source-lang", source), ("--target-lang", target)):
        if code is not None and code not in by_code:
            near = difflib.get_close_matches(code, by_code, n=1, cutoff=0.3)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(by_code))}"
            raise Refused(f"{option} {code!r} is no language of this model: {hint}")
    tokenizer.src_lang = source
    if target is None:
        forced = own.forced_bos_token_id
        return {"forced_bos_token_id": forced} if forced in fixed else {}
    begins = type(tokenizer).__name__.startswith("MBartTokenizer")  # others begin with the end token, then the language
    return {"decoder_start_token_id" if begins else "forced_bos_token_id": by_code[target]}


def check_monolingual(tokenizer: Any, command: str) -> None:
    """Raises Refused for a model that needs language codes, in a command without options for them."""
    if many(tokenizer):
        raise Refused(f"this model reads and writes many languages, and `{command}` names none: give it another model")


def many(tokenizer: Any) -> bool:
    """Whether a tokenizer has a source language to set (mBART, M2M100, NLLB)."""
    return isinstance(getattr(type(tokenizer), "src_lang", None), property)


def codes(tokenizer: Any) -> dict[str, int]:
    """Language code -> its token."""
    if found := getattr(tokenizer, "lang_code_to_id", None):
        return dict(found)
    added = [token for token in tokenizer.all_special_tokens if token not in tokenizer.special_tokens_map.values()]
    return {token: tokenizer.convert_tokens_to_ids(token) for token in added}
