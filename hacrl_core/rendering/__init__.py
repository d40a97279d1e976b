"""Text to tokens and back: prompts through an agent's chat template, other agents' responses in its own tokens."""

from hacrl_core.rendering.boundary import Boundary, Written, boundary_of, settle_ids, settle_response
from hacrl_core.rendering.plain_text import specials_of
from hacrl_core.rendering.prompts import render_prompt
from hacrl_core.rendering.responses import (
    EncodedResponse,
    decode_response,
    encode_response,
    tokenizer_fingerprint,
    turn_end,
)

__all__ = [
    "Boundary",
    "EncodedResponse",
    "Written",
    "boundary_of",
    "decode_response",
    "encode_response",
    "render_prompt",
    "settle_ids",
    "settle_response",
    "specials_of",
    "tokenizer_fingerprint",
    "turn_end",
]
