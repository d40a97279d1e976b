"""When may one agent's token ids be used verbatim by another?"""

import hashlib
import json
from typing import Any

from hacrl_core.rendering.plain_text import specials_of


def tokenizer_fingerprint(tokenizer: Any, chat_template: str | None = None) -> str:
    """Equal fingerprints: ids of one agent mean the same to the other, and follow the same prompt.

    Covers vocabulary, merges, normalizer, pre-tokenizer, decoder, added and special tokens with their roles, and the chat
    template (the override, where an agent has one). Leaves out what only a call sets: padding, truncation, paths.
    """
    identity = {
        "pipeline": _pipeline(tokenizer),
        "special_ids": {str(token_id): text for token_id, text in specials_of(tokenizer).texts.items()},
        "roles": {role: str(token) for role, token in tokenizer.special_tokens_map.items()},
        "chat_template": chat_template if chat_template is not None else getattr(tokenizer, "chat_template", None),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _pipeline(tokenizer: Any) -> dict[str, Any]:
    if getattr(tokenizer, "is_fast", False):
        spec: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        return {name: part for name, part in spec.items() if name not in ("padding", "truncation")}
    pipeline = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    model = getattr(tokenizer, "sp_model", None)
    if model is not None:  # scores and normalisation of a sentencepiece model are not in the vocabulary
        pipeline["sentencepiece"] = hashlib.sha256(model.serialized_model_proto()).hexdigest()
    return pipeline
