"""Stop strings. The text ends before the string; the tokens end with the one that completed it.

Tokens and text are cut differently on purpose: the tokens, with their log-probs, are what the model really wrote, so a
learner trained on them also learns to write the end; the text is what the verifier and the other agents read.
"""

from collections.abc import Sequence
from typing import Any

from hacrl_core.rendering import decode_response


class StopStrings:
    """The stop strings of a call, found in tokens and cut from texts."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], stop_token_ids: Sequence[int] = ()) -> None:
        """``stop_token_ids`` are the agent's end tokens, which need not be special tokens of its tokenizer."""
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._strings = tuple(strings)
        # A token adds at least one byte, so this many tokens hold the longest string; the rest absorbs a token that
        # begins before it and a multi-byte character split over tokens.
        self._window = max((len(s.encode()) for s in strings), default=0) + 8

    def __bool__(self) -> bool:
        return bool(self._strings)

    def completed(self, token_ids: Sequence[int]) -> bool:
        """Whether a stop string is within the last tokens; called after every token, so earlier ones were checked."""
        tail = decode_response(self._tokenizer, token_ids[-self._window :])
        return any(s in tail for s in self._strings)

    def text(self, token_ids: Sequence[int]) -> str:
        """The response as read by others: up to its end token or first stop string, without special tokens and torn
        characters.
        """
        ended = bool(len(token_ids)) and token_ids[-1] in self._stop_token_ids
        text = decode_response(self._tokenizer, token_ids[:-1] if ended else token_ids)
        cuts = [at for s in self._strings if (at := text.find(s)) >= 0]
        return text[: min(cuts)] if cuts else text
