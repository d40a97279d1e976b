"""Text to tokens and back: a prompt through an agent's chat template, another agent's response in one's own tokens."""

from hacrl_core.rendering.identity import tokenizer_fingerprint
from hacrl_core.rendering.prompts import render_prompt
from hacrl_core.rendering.responses import EncodedResponse, decode_response, encode_response, turn_end

__all__ = [
    "EncodedResponse",
    "decode_response",
    "encode_response",
    "render_prompt",
    "tokenizer_fingerprint",
    "turn_end",
]
