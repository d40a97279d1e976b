"""Responses travel between agents as text: out of the sampler's tokens, into the learner's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hacrl_core.errors import EngineError
from hacrl_core.rendering.plain_text import encode_plain_text

_REPLACEMENT = "�"  # what a decoder writes for bytes that are no character


@dataclass(frozen=True)
class EncodedResponse:
    token_ids: tuple[int, ...]  # empty only where an unfinished response had no text: such a row cannot be scored
    truncated: bool  # something, be it only the end token, did not fit the learner's limit


def encode_response(
    tokenizer: Any, text: str, *, finished: bool, stop_token_id: int, max_tokens: int
) -> EncodedResponse:
    """Another agent's response in the learner's tokens.

    Nothing in ``text`` becomes a special token. The learner's own end token follows iff the sampler ended its response
    (``finished``), also when the text is empty: an agent that only wrote its end token said "nothing more", and that can be
    scored. At most ``max_tokens`` tokens, the end token counted; what is cut off takes the end token with it.
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
    """The text of a response without special tokens, as the other agents and the verifier see it.

    A response cut by its length limit may end inside a character of several bytes; the torn bytes are left out, they would
    reach other agents as U+FFFD, which nobody wrote.
    """
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text).rstrip(_REPLACEMENT)


def turn_end(tokenizer: Any, stop_token_ids: Sequence[int]) -> int:
    """The end token that the chat template writes after an assistant's turn: of a model's several ones, the one the learner expects there.

    Llama 3.2, for one, lists its end of text first and ends turns with another. Where the template does not tell, the tokenizer's.
    """
    turn = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
    try:
        text = tokenizer.apply_chat_template(turn, tokenize=False)
    except Exception:  # no template, or one that takes no such conversation: whatever a template may raise
        text = ""
    written = [int(i) for i in tokenizer.encode(str(text), add_special_tokens=False) if i in stop_token_ids]
    if written:
        return written[-1]
    return int(tokenizer.eos_token_id if tokenizer.eos_token_id in stop_token_ids else stop_token_ids[0])
