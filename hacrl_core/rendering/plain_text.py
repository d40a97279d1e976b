"""Encode text as nothing but text: whatever it spells, no special token comes out.

``split_special_tokens=True`` keeps a tokenizer from *looking for* its special tokens, but a model whose vocabulary
holds them as ordinary pieces still finds them: a Unigram model reads ``</s>`` in a response as its end token. When a
special id turns up, the text is therefore encoded again by a copy of the tokenizer in which every special token has a
name that no text spells.
"""

import json
import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

# Names of the copy's special tokens: U+0000 and a private-use character; no pre-tokenizer or merge leads to them.
_UNSPELLABLE = "\x00\U0010fffd{id}\U0010fffd\x00"


@dataclass(frozen=True)
class Specials:
    """Every special token of a tokenizer, by role or added."""

    # By id.
    texts: dict[int, str]
    # Finds their texts, the longest first; None where there are none.
    pattern: re.Pattern[str] | None


# Caches of pure functions, not state. Some tokenizers have thousands of special tokens, and asking for them takes
# longer than encoding a page; building a copy parses the whole vocabulary (about a second for 150k entries).
_State = tuple[int, tuple[int, ...]]
_specials: WeakKeyDictionary[Any, tuple[_State, Specials]] = WeakKeyDictionary()
_copies: WeakKeyDictionary[Any, tuple[_State, Tokenizer]] = WeakKeyDictionary()


def specials_of(tokenizer: Any) -> Specials:
    """Return the special tokens of a tokenizer, cached until tokens or roles change."""
    known = _specials.get(tokenizer)
    state = _state(tokenizer)
    if known is not None and known[0] == state:
        return known[1]
    texts = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts |= {int(token_id): token.content for token_id, token in added.items() if token.special}
    # A special token of white space only (some tokenizers have one for a new line) is not markup.
    visible = sorted((text for text in texts.values() if text.strip()), key=len, reverse=True)
    specials = Specials(texts, re.compile("|".join(map(re.escape, visible))) if visible else None)
    _specials[tokenizer] = (state, specials)
    return specials


def _state(tokenizer: Any) -> _State:
    """Return a value that changes when tokens are added or roles are reassigned."""
    return len(tokenizer), tuple(tokenizer.all_special_ids)


def encode_plain_text(tokenizer: Any, text: str, *, never: frozenset[int] = frozenset()) -> list[int]:
    """Return the token ids of ``text``: no BOS or end token is added, no character is read as a special token.

    Characters outside the vocabulary become the tokenizer's unknown token. Where that is also its BOS or end token or
    is in ``never`` (GPT-2 style tokenizers), they are left out: a sequence must not start or end inside a text.
    """
    # A lone surrogate cannot be tokenised.
    text = text.encode("utf-8", "replace").decode("utf-8")
    ids = _ids(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False))
    specials = specials_of(tokenizer).texts
    if specials.keys().isdisjoint(ids):
        return ids
    if getattr(tokenizer, "is_fast", False):
        ids = _ids(_copy_of(tokenizer, specials).encode(text, add_special_tokens=False).ids)
    unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id} - never
    forbidden = specials.keys() - unknown
    return [token_id for token_id in ids if token_id not in forbidden]


def _ids(values: Any) -> list[int]:
    return [int(value) for value in values]


def _copy_of(tokenizer: Any, specials: dict[int, str]) -> Tokenizer:
    known = _copies.get(tokenizer)
    state = _state(tokenizer)
    if known is not None and known[0] == state:
        return known[1]
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    copy = Tokenizer.from_str(json.dumps(_with_unspellable_specials(spec, specials)))
    copy.encode_special_tokens = True
    _copies[tokenizer] = (state, copy)
    return copy


def _with_unspellable_specials(spec: dict[str, Any], specials: dict[int, str]) -> dict[str, Any]:
    """Rename the special tokens in place, so that every id stays; drop merges that would build one."""
    names = {content: _UNSPELLABLE.format(id=token_id) for token_id, content in specials.items()}
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("merges"):
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return spec | {"post_processor": None, "truncation": None, "padding": None}
