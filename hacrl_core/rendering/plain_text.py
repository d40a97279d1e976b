"""Encode text as nothing but text: whatever it spells, no special token comes out.

``split_special_tokens=True`` keeps a tokenizer from *looking for* its special tokens, but a model whose vocabulary holds
them as ordinary pieces still finds them: a Unigram model reads ``</s>`` in a response as its end token. So when a special id
turns up, the text is encoded again by a twin of the tokenizer in which every special token has a name that no text spells.
"""

import json
import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

# Names of the twin's special tokens: U+0000 and a private-use character, so that no pre-tokenizer or merge leads to them.
_UNSPELLABLE = "\x00\U0010fffd{id}\U0010fffd\x00"


@dataclass(frozen=True)
class Specials:
    """Every special token of a tokenizer, named role or added."""

    texts: dict[int, str]  # by id
    pattern: re.Pattern[str] | None  # finds their texts, the longest first; None where there are none


# Memos of pure functions, not state. Some tokenizers have thousands of special tokens, and asking for them takes longer than
# encoding a page; building a twin parses the whole vocabulary (about a second for 150k entries).
_State = tuple[int, tuple[int, ...]]
_specials: WeakKeyDictionary[Any, tuple[_State, Specials]] = WeakKeyDictionary()
_twins: WeakKeyDictionary[Any, tuple[_State, Tokenizer]] = WeakKeyDictionary()


def specials_of(tokenizer: Any) -> Specials:
    known = _specials.get(tokenizer)
    state = _state(tokenizer)
    if known is not None and known[0] == state:
        return known[1]
    texts = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts |= {int(token_id): token.content for token_id, token in added.items() if token.special}
    # A special token of white space only (some have one for a new line) is no markup, whoever writes it.
    visible = sorted((text for text in texts.values() if text.strip()), key=len, reverse=True)
    specials = Specials(texts, re.compile("|".join(map(re.escape, visible))) if visible else None)
    _specials[tokenizer] = (state, specials)
    return specials


def _state(tokenizer: Any) -> _State:
    """Changes when tokens are added or roles are given to others."""
    return len(tokenizer), tuple(tokenizer.all_special_ids)


def encode_plain_text(tokenizer: Any, text: str, *, never: frozenset[int] = frozenset()) -> list[int]:
    """Token ids of ``text``, no BOS or end token added, none of its characters read as a special token.

    Characters outside the vocabulary become the tokenizer's unknown token, unless that doubles as its BOS or end token or
    is in ``never`` (GPT-2 style tokenizers): then they are left out, for a sequence must not start or end inside a text.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be tokenised
    ids = _ids(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False))
    specials = specials_of(tokenizer).texts
    if specials.keys().isdisjoint(ids):
        return ids
    if getattr(tokenizer, "is_fast", False):
        ids = _ids(_twin(tokenizer, specials).encode(text, add_special_tokens=False).ids)
    unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id} - never
    forbidden = specials.keys() - unknown
    return [token_id for token_id in ids if token_id not in forbidden]


def _ids(values: Any) -> list[int]:
    return [int(value) for value in values]


def _twin(tokenizer: Any, specials: dict[int, str]) -> Tokenizer:
    known = _twins.get(tokenizer)
    state = _state(tokenizer)
    if known is not None and known[0] == state:
        return known[1]
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    twin = Tokenizer.from_str(json.dumps(_with_unspellable_specials(spec, specials)))
    twin.encode_special_tokens = True
    _twins[tokenizer] = (state, twin)
    return twin


def _with_unspellable_specials(spec: dict[str, Any], specials: dict[int, str]) -> dict[str, Any]:
    """Rename in place, so that every id stays where it is; merges that would build a special token go."""
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
