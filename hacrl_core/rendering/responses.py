"""Responses travel between agents as text: out of the sampler's tokens, into the learner's.

Agents whose tokenizers have the same fingerprint exchange token ids as they are.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hacrl_core.errors import EngineError
from hacrl_core.rendering.plain_text import encode_plain_text, specials_of

# What a decoder writes for bytes that are no character.
_REPLACEMENT = "�"


@dataclass(frozen=True)
class EncodedResponse:
    """A response in the learner's tokens."""

    # Empty only where an unfinished response had no text: such a row cannot be scored.
    token_ids: tuple[int, ...]
    # Whether anything, even the end token alone, did not fit the learner's limit.
    truncated: bool


def encode_response(
    tokenizer: Any, text: str, *, finished: bool, stop_token_id: int, max_tokens: int
) -> EncodedResponse:
    """Encode another agent's response in the learner's tokens.

    Nothing in ``text`` becomes a special token. The learner's own end token follows iff the sampler ended its response
    (``finished``), also when the text is empty: a response of only an end token can be scored. There are at most
    ``max_tokens`` tokens, the end token included; a response that is cut off loses its end token.
    """
    if max_tokens < 1:
        raise EngineError(
            f"encode_response: max_tokens is {max_tokens}; the learner's response limit must be at least 1"
        )
    ids = encode_plain_text(tokenizer, text, never=frozenset({stop_token_id}))
    if finished:
        ids.append(stop_token_id)
    return EncodedResponse(tuple(ids[:max_tokens]), truncated=len(ids) > max_tokens)


def decode_response(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of a response without special tokens, as the other agents and the verifier see it.

    A response cut by its length limit may end inside a character of several bytes. Its bytes are left out: otherwise
    other agents would read U+FFFD, which the sampler did not write.
    """
    ids = list(token_ids)
    if _decodes_plainly(tokenizer):
        text = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    else:
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text).rstrip(_REPLACEMENT)


def _decodes_plainly(tokenizer: Any) -> bool:
    """Whether a tokenizer hands ids to its Rust backend and adds nothing to the text.

    What transformers does around that call, looking at every id, takes longer than decoding a short response.
    """
    from transformers import PreTrainedTokenizerFast as Plain

    kind = type(tokenizer)
    return issubclass(kind, Plain) and all(
        getattr(kind, name) is getattr(Plain, name) for name in ("decode", "_decode")
    )


def turn_end(tokenizer: Any, stop_token_ids: Sequence[int]) -> int:
    """Return the end token that the chat template writes after an assistant's turn.

    A model may have several: Llama 3.2 lists its end of text first and ends turns with another. Where the template does
    not tell, this is the tokenizer's own end token.
    """
    turn = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
    try:
        text = tokenizer.apply_chat_template(turn, tokenize=False)
    except Exception:
        # No template, or one that refuses such a conversation; a template may raise anything.
        text = ""
    written = [int(i) for i in tokenizer.encode(str(text), add_special_tokens=False) if i in stop_token_ids]
    if written:
        return written[-1]
    return int(tokenizer.eos_token_id if tokenizer.eos_token_id in stop_token_ids else stop_token_ids[0])


def tokenizer_fingerprint(tokenizer: Any, chat_template: str | None = None) -> str:
    """Return a digest that two agents share iff token ids mean the same to both and follow the same prompt.

    It covers vocabulary, merges, normalizer, pre-tokenizer, decoder, added and special tokens with their roles, and the
    chat template (the override, where an agent has one). It leaves out what a call sets: padding, truncation, paths.
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
    # Scores and normalisation of a sentencepiece model are not in the vocabulary.
    if model is not None:
        pipeline["sentencepiece"] = hashlib.sha256(model.serialized_model_proto()).hexdigest()
    return pipeline
