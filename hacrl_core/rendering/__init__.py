"""Text to tokens and back: prompts through an agent's chat template, other agents' responses in its own tokens."""

from hacrl_core.rendering.prompts import render_prompt
from hacrl_core.rendering.responses import (
    EncodedResponse,
    decode_response,
    encode_response,
    tokenizer_fingerprint,
    turn_end,
)

__all__ = [
    "EncodedResponse",
    "decode_response",
    "encode_response",
    "render_prompt",
    "tokenizer_fingerprint",
    "turn_end",
]
