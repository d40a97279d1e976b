"""What the stages ask of an engine. The built-in torch engine and vLLM both answer to these."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, and where a response ends at the latest."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    max_tokens: int = 256
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One response wanted. Requests with equal ``prompt_token_ids`` share one prefill."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Generation:
    """One response, with its log-probs."""

    request_id: str
    token_ids: tuple[int, ...]  # the end token included where the model wrote one
    text: str  # without special tokens
    policy_logprobs: tuple[float, ...]  # of the raw policy: temperature 1, nothing cut off
    sampling_logprobs: tuple[float, ...]  # of the distribution the token was drawn from
    finish_reason: Literal["stop", "length"]


ProgressCallback = Callable[[int, int], None]  # responses finished, tokens generated, both since the start


class GenerationEngine(Protocol):
    """Samples from one agent's checkpoint folder; stays warm between calls, reloads when the weights change."""

    @property
    def name(self) -> str:
        """The engine's name, as manifests record it."""

    @property
    def version(self) -> str:
        """The versions behind it, as manifests record them."""

    def generate(
        self,
        checkpoint: Path,
        policy_digest: str,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_progress: ProgressCallback | None = None,
    ) -> list[Generation]:
        """Return one response per request, in their order, all from the policy ``policy_digest``."""

    def rest(self) -> None:
        """Free the device's memory until the next call."""

    def close(self) -> None:
        """Stop and free everything; the next call starts again."""
