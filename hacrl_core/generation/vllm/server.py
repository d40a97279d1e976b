"""vLLM as a server that the user runs: ``vllm serve CHECKPOINT``, spoken to over its OpenAI-style completions."""

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.errors import EngineError
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.vllm.backend import OnResponse, OnTokens, Response, vllm_params
from hacrl_core.generation.vllm.proof import Expected

SWAPS = ("hacrl_swap_weights", "reload_weights")  # ours, where the server has our extension, else vLLM's own


class ServerBackend:
    """A server of the user's.

    It may be shared, so nothing is taken on trust: the engine proves its weights before and after each call.
    """

    def __init__(self, config: VllmEngineConfig) -> None:
        self._config = config
        self._url = str(config.url).rstrip("/").removesuffix("/v1")
        self._model = ""
        self._version = ""
        self._extended = False  # whether it has our extension, and lets us call it

    @property
    def unproved(self) -> str:
        """What to do when its weights are not the ones asked for."""
        return (
            f"start the server at {self._url} on this checkpoint, or with VLLM_SERVER_DEV_MODE=1 and our worker "
            "extension, so that weights can be swapped (docs/vllm.md)"
        )

    @property
    def version(self) -> str:
        """The server's vLLM version."""
        if not self._version:
            self._version = f"vllm {self._call('/version')['version']}"
        return self._version

    def load(self, checkpoint: Path, digest: str, max_length: int, dtype: str) -> None:
        """Find out which model the server has, and ask it for these weights."""
        model = self._call("/v1/models")["data"][0]
        self._model = model["id"]
        self.swap(checkpoint, digest)

    def swap(self, checkpoint: Path, digest: str) -> None:
        """Ask for the weights where the server lets us; the proof tells whether it has taken them."""
        for method in SWAPS:
            body: dict[str, Any] = {"method": method, "args": [str(checkpoint.absolute())]}
            if method == "reload_weights":
                body = {"method": method, "kwargs": {"weights_path": str(checkpoint.absolute())}}
            try:
                self._call("/collective_rpc", body)
                self._extended = method == SWAPS[0]
                self._call("/reset_prefix_cache", {})
                return
            except _HttpError as error:
                if error.status == 404:  # not in development mode: it serves what it was started on
                    return

    def differing(self, checkpoint: Path) -> list[str]:
        """Return the parameters in vLLM's memory that are not the checkpoint's; empty where that cannot be asked."""
        if not self._extended:
            return []
        body = {"method": "hacrl_differing_weights", "args": [str(checkpoint.absolute())]}
        return sorted({name for names in self._call("/collective_rpc", body)["results"] for name in names})

    def probe(self, token_ids: Sequence[int]) -> list[list[float]]:
        """Return the log-probs of one sequence."""
        return self.score([token_ids])

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs under the raw policy of every token but the first."""
        with self._pool(len(sequences)) as pool:
            return list(pool.map(self._score, sequences))

    def _score(self, token_ids: Sequence[int]) -> list[float]:
        choice = self._complete(token_ids, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
        rows = choice["prompt_logprobs"][1:]
        return [float(row[str(token)]["logprob"]) for token, row in zip(token_ids[1:], rows, strict=True)]

    def sample(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        expected: Expected,
        on_response: OnResponse,
        on_tokens: OnTokens,
    ) -> None:
        """Sample; responses are reported as they finish, tokens as they are written."""
        if params.temperature not in (0, 1) or params.top_p < 1 or params.top_k > 0:
            self._check_mode(expected)
        common = vllm_params(params, expected) | {"logprobs": 1}
        written = 0
        with self._pool(len(requests)) as pool:
            broken_off = threading.Event()
            futures = [pool.submit(self._respond, request, common, broken_off) for request in requests]
            try:
                for future in as_completed(futures):
                    response = future.result()
                    on_response(response)
                    written += len(response.token_ids)
                    on_tokens(written)
            except BaseException:
                broken_off.set()
                raise

    def _respond(self, request: GenerationRequest, common: dict[str, Any], broken_off: threading.Event) -> Response:
        if broken_off.is_set():
            raise EngineError(f"request {request.request_id}: not sent, an earlier one failed")
        choice = self._complete(request.prompt_token_ids, common | {"seed": request.seed})
        logprobs = tuple(float(x) for x in choice["logprobs"]["token_logprobs"])
        return Response(request.request_id, tuple(choice["token_ids"]), logprobs, choice["finish_reason"])

    def _check_mode(self, expected: Expected) -> None:
        """Check by one token at temperature 2 that log-probs are those of the distribution sampled from."""
        settings = {"max_tokens": 1, "temperature": 2.0, "seed": 0, "logprobs": 1}
        choice = self._complete(expected.probe, settings)
        tempered_V = expected.next_logprobs_V / 2.0
        tempered_V = tempered_V - np.logaddexp.reduce(tempered_V)
        token, found = choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]
        if abs(found - expected.next_logprobs_V[token]) < abs(found - tempered_V[token]):
            raise EngineError(
                f"vLLM server {self._url}: it returns log-probs of the raw policy, not of the distribution sampled "
                "from; start it with --logprobs-mode processed_logprobs"
            )

    def sleep(self) -> None:
        """Do nothing: the server is the user's, and the config refuses ``keep: sleep`` for it."""

    def close(self) -> None:
        """Do nothing: the server is the user's and stays."""

    def _pool(self, count: int) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max(1, min(count, self._config.max_sequences)))

    def _complete(self, prompt: Sequence[int], settings: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self._model, "prompt": list(prompt), "return_token_ids": True, **settings}
        choice: dict[str, Any] = self._call("/v1/completions", body)["choices"][0]
        return choice

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("HACRL_VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._config.request_timeout) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise _HttpError(f"vLLM server {self._url}{path}: HTTP {error.code}: {text}", error.code) from error
        except OSError as error:
            raise EngineError(
                f"vLLM server {self._url}: {error}; start it with `vllm serve`, or leave engine.url empty for a worker "
                "of our own"
            ) from error


class _HttpError(EngineError):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
