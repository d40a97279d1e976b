"""What the scheduler asks of a decoder: prompts prefilled once, rows that come and go, one token per row and step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Prefill:
    """Prompts read once: the logits after each, and its keys and values in the decoder's own form."""

    logits_PV: Tensor
    lengths: tuple[int, ...]
    cache: Any


class Decoder(Protocol):
    """A batch of live rows; row i is the i-th admitted row still kept."""

    joinable: bool  # False: new rows may only be admitted when no row is live

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Prefill: ...

    def admit(self, prefill: Prefill, rows: Sequence[int]) -> None:
        """Append one live row for each entry: a copy of that prompt's cache."""

    def keep(self, rows: Sequence[int]) -> None:
        """Live rows become these, in this order."""

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to every live row; logits_BV of the next."""

    def reset(self) -> None:
        """Drop all rows, for example after an error."""
