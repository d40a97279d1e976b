"""What the engine asks of the two places vLLM can run: our worker process, or the user's server."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.vllm.process import WorkerProcess, find_python
from hacrl_core.generation.vllm.proof import Expected


@dataclass(frozen=True)
class Response:
    """What vLLM wrote.

    The log-probs are those of the distribution sampled from, except at temperature 0: there they are the raw policy's.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


OnResponse = Callable[[Response], None]
OnTokens = Callable[[int], None]


class Backend(Protocol):
    """A place where vLLM runs, holding the weights of one policy at a time."""

    @property
    def version(self) -> str:
        """vLLM's version there."""

    @property
    def unproved(self) -> str:
        """What to do when its weights are not the ones asked for."""

    def load(self, checkpoint: Path, digest: str, max_length: int, dtype: str) -> None:
        """Start, with these weights."""

    def swap(self, checkpoint: Path, digest: str) -> None:
        """Replace the weights without a restart."""

    def differing(self, checkpoint: Path) -> list[str]:
        """Parameters in vLLM's memory that are not those of the checkpoint; empty also where that cannot be asked."""

    def probe(self, token_ids: Sequence[int]) -> list[list[float]]:
        """Log-probs of one sequence under each copy of the weights that is there."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs under the raw policy of every token but the first."""

    def sample(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        expected: Expected,
        on_response: OnResponse,
        on_tokens: OnTokens,
    ) -> None:
        """Sample; responses are reported as they finish, tokens as they are written."""

    def sleep(self) -> None:
        """Let go of the weights and of all device memory, but stay; the next swap wakes it."""

    def close(self) -> None:
        """Stop what we started there."""


def vllm_params(params: SamplingParams, expected: Expected) -> dict[str, Any]:
    """Return the sampling settings under vLLM's names."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_tokens": params.max_tokens,
        "stop": list(params.stop_strings),
        "stop_token_ids": list(expected.stop_token_ids),
    }


class WorkerBackend:
    """A worker process of ours."""

    def __init__(self, config: VllmEngineConfig, environment: dict[str, str] | None = None) -> None:
        """``environment`` are variables of this worker alone, e.g. the GPUs that it sees."""
        self._config = config
        self._worker = WorkerProcess(find_python(config.python), environment)
        self._digest = ""
        self._deadline = 0.0

    unproved = "use engine.dtype float32, raise engine.weight_tolerance, or choose the built-in engine for this model"

    @property
    def version(self) -> str:
        """vLLM's version in the worker's environment."""
        return f"vllm {self._worker.version}"

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._worker.pid

    def load(self, checkpoint: Path, digest: str, max_length: int, dtype: str) -> None:
        """Start the worker and an engine with these weights."""
        config = self._config
        self._worker.start(config.startup_timeout)
        self._begin(
            "load",
            digest,
            config.startup_timeout,
            checkpoint=str(checkpoint.absolute()),
            max_length=max_length,
            dtype=dtype,
            memory_share=config.memory_share,
            max_sequences=config.max_sequences,
            tensor_parallel_size=config.tensor_parallel_size,
            enforce_eager=config.enforce_eager,
            can_sleep=config.keep == "sleep",
        )
        self._finish()

    def swap(self, checkpoint: Path, digest: str) -> None:
        """Replace the weights without a restart; a sleeping engine wakes up for it."""
        self._begin("swap", digest, self._config.startup_timeout, checkpoint=str(checkpoint.absolute()))
        self._finish()

    def sleep(self) -> None:
        """Let go of the weights and of all device memory, but stay."""
        self._begin("sleep", self._digest, self._config.startup_timeout)
        self._finish()

    def differing(self, checkpoint: Path) -> list[str]:
        """Return the parameters in vLLM's memory that are not those of the checkpoint."""
        self._begin("prove", self._digest, self._config.startup_timeout, checkpoint=str(checkpoint.absolute()))
        found: list[str] = self._finish()["differing"]
        return found

    def probe(self, token_ids: Sequence[int]) -> list[list[float]]:
        """Return the log-probs of one sequence."""
        return self.score([token_ids])

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs under the raw policy of every token but the first."""
        self._begin("score", self._digest, self._config.request_timeout, sequences=[list(ids) for ids in sequences])
        found: list[list[float]] = self._finish()["logprobs"]
        return found

    def sample(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        expected: Expected,
        on_response: OnResponse,
        on_tokens: OnTokens,
    ) -> None:
        """Sample; responses are reported as they finish, tokens as they are written."""
        self.begin_sampling(requests, params, expected)
        while (found := self.next_found()) is not None:
            on_tokens(found) if isinstance(found, int) else on_response(found)

    def begin_sampling(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        expected: Expected,
        *,
        more_follows: bool = False,
    ) -> None:
        """Send the requests; with ``more_follows`` the worker goes on until `end_of_requests`."""
        self._begin(
            "sample",
            self._digest,
            self._config.request_timeout,
            requests=_wanted(requests),
            params=vllm_params(params, expected),
            more_follows=more_follows,
        )

    def add_requests(self, requests: Sequence[GenerationRequest]) -> None:
        """Give a sampling worker more to do."""
        self._worker.send({"op": "add", "requests": _wanted(requests)})

    def end_of_requests(self) -> None:
        """Tell a sampling worker that nothing more follows."""
        self._worker.send({"op": "end"})

    def next_found(self) -> Response | int | None:
        """Return the next finished response, or the tokens written so far; None at the end of sampling."""
        reply = self._worker.receive(self._deadline)
        if reply["event"] == "done":
            return None
        if reply["event"] == "progress":
            return int(reply["tokens"])
        self._check(reply)
        fields = tuple(reply["token_ids"]), tuple(reply["logprobs"]), reply["finish_reason"]
        return Response(reply["id"], *fields)

    def close(self) -> None:
        """End the worker and everything it started."""
        self._worker.kill()

    def _begin(self, operation: str, digest: str, seconds: float, **arguments: Any) -> None:
        self._digest = digest
        self._deadline = time.monotonic() + seconds
        self._worker.send({"op": operation, "digest": digest, **arguments})

    def _finish(self) -> dict[str, Any]:
        reply = self._worker.receive(self._deadline)
        self._check(reply)
        return reply

    def _check(self, reply: dict[str, Any]) -> None:
        if reply["digest"] != self._digest:
            raise RuntimeError(f"vLLM worker {self.pid} answered for policy {reply['digest']}, not {self._digest}")


def _wanted(requests: Sequence[GenerationRequest]) -> list[dict[str, Any]]:
    return [{"id": r.request_id, "prompt": list(r.prompt_token_ids), "seed": r.seed} for r in requests]
