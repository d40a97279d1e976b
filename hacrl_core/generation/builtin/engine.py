"""The engine that the generate and evaluate stages call: loads an agent, keeps it warm, samples, explains failures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from hacrl_core.agents.agent import Agent, load_agent
from hacrl_core.agents.checkpoints import reload_agent
from hacrl_core.agents.out_of_memory import LOADING, out_of_memory_explained
from hacrl_core.config.generation import BuiltinEngineConfig
from hacrl_core.errors import EngineError
from hacrl_core.generation.builtin.decoder import Decoder, GenericDecoder, takes_logits_to_keep
from hacrl_core.generation.builtin.fast import FastDecoder, build_fast_decoder
from hacrl_core.generation.builtin.scheduler import Sampled, Scheduler, StopRule
from hacrl_core.generation.protocols import Generation, GenerationRequest, ProgressCallback, SamplingParams
from hacrl_core.generation.stop_strings import StopStrings

# The most logits that settling a draw computes where it needs one row of them: 8 MB.
WHOLE_LOGITS = 1 << 21


@dataclass(frozen=True)
class _Loaded:
    policy_digest: str
    agent: Agent
    decoder: Decoder


class BuiltinEngine:
    """Samples from one agent at a time; the last agent stays loaded until other weights are asked for."""

    name = "builtin"

    def __init__(
        self,
        config: BuiltinEngineConfig | None = None,
        *,
        batch_size: int = 256,
        max_prompt_tokens: int | None = None,
        own_code: bool = False,
    ) -> None:
        self.config = config or BuiltinEngineConfig()
        self.batch_size = batch_size
        self.max_prompt_tokens = max_prompt_tokens
        self._own_code = own_code
        self.version = f"torch {torch.__version__}, transformers {transformers.__version__}"
        self._loaded: _Loaded | None = None

    def generate(
        self,
        checkpoint: Path,
        policy_digest: str,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_progress: ProgressCallback | None = None,
    ) -> list[Generation]:
        """Return one response per request, in the order of the requests."""
        if not requests:
            return []
        loaded = self._load(checkpoint, policy_digest)
        return self._sample(loaded, requests, params, on_progress)

    def release(self) -> None:
        """Free the agent's memory; the next call loads again."""
        self._loaded = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def rest(self) -> None:
        """Free the agent's memory; the next call loads it again."""
        self.release()

    def close(self) -> None:
        """Free the agent's memory; there is nothing else to stop."""
        self.release()

    def _load(self, checkpoint: Path, policy_digest: str) -> _Loaded:
        if self._loaded is None or self._loaded.policy_digest != policy_digest:
            last, self._loaded = self._loaded, None  # an error on the way leaves no half-changed agent behind
            with out_of_memory_explained(checkpoint, f"loading it on {self._device()}", LOADING):
                agent = None if last is None else reload_agent(last.agent, checkpoint)
                storage = (
                    last.decoder.give_storage() if agent and last and isinstance(last.decoder, FastDecoder) else None
                )
                last = None  # before loading, so that two agents are never in memory at once
                if agent is None:
                    dtype = getattr(torch, self.config.dtype)
                    agent = load_agent(checkpoint, dtype=dtype, device=self._device(), own_code=self._own_code)
                self._loaded = _Loaded(policy_digest, agent, self._decoder(agent, storage))
        return self._loaded

    def _decoder(self, agent: Agent, storage: Tensor | None) -> Decoder:
        if self.config.fast_path:
            fast = build_fast_decoder(agent.model, agent.pad_token_id, agent.context_length, storage)
            if fast is not None:
                return fast
        return GenericDecoder(agent.model, agent.pad_token_id)

    def _device(self) -> str:
        if self.config.device != "auto":
            return self.config.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def _sample(
        self,
        loaded: _Loaded,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_progress: ProgressCallback | None,
    ) -> list[Generation]:
        agent = loaded.agent
        self._check(agent, requests, params)
        strings = StopStrings(agent.tokenizer, params.stop_strings, agent.stop_token_ids)
        # Below float32, rounding between batch shapes is far wider than the margin that can be settled row by row.
        exact = agent.model.dtype == torch.float32
        scheduler = Scheduler(
            loaded.decoder,
            requests,
            params,
            StopRule(agent.stop_token_ids, strings),
            batch_size=self.batch_size,
            device=agent.device,
            logits_alone=(lambda ids: _settling_logits(loaded, ids)) if exact else None,
            on_progress=on_progress,
        )
        try:
            doing = f"on {agent.device} with batch_size {self.batch_size}"
            remedy = "lower generate.batch_size or max_tokens"
            with torch.inference_mode(), out_of_memory_explained(agent.checkpoint, doing, remedy):
                sampled = scheduler.run()
        finally:
            loaded.decoder.reset()
        return [_generation(r, s, strings.text(s.token_ids)) for r, s in zip(requests, sampled, strict=True)]

    def _check(self, agent: Agent, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        where = f"agent {agent.checkpoint}"
        context = agent.context_length
        for request in requests:
            length = len(request.prompt_token_ids)
            if not length:
                raise EngineError(f"{where}, request {request.request_id}: the prompt has no tokens; give it a message")
            if self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
                raise EngineError(
                    f"{where}, request {request.request_id}: a prompt of {length} tokens is longer than "
                    f"max_prompt_tokens = {self.max_prompt_tokens}; raise it or drop the problem"
                )
            if length + params.max_tokens > context:
                raise EngineError(
                    f"{where}, request {request.request_id}: {length} prompt tokens + max_tokens {params.max_tokens} "
                    f"exceed the model's context of {context}; lower max_tokens or drop the problem"
                )


def _settling_logits(loaded: _Loaded, token_ids: Sequence[int]) -> Tensor:
    """Return the logits that decide an ambiguous draw; small models have compiled code for them."""
    native = loaded.decoder.logits_alone(token_ids) if isinstance(loaded.decoder, FastDecoder) else None
    return _logits_alone(loaded.agent, token_ids) if native is None else native


def _logits_alone(agent: Agent, token_ids: Sequence[int]) -> Tensor:
    """Return the logits that follow a sequence, computed without any company.

    Short sequences of small vocabularies go through the head whole, as they always did, bit for bit; of others only the
    last position does: all of them would take gigabytes at a vocabulary of 262k tokens.
    """
    ids = torch.tensor([list(token_ids)], device=agent.device)
    few = ids.numel() * agent.model.config.get_text_config().vocab_size <= WHOLE_LOGITS
    last = {} if few or not takes_logits_to_keep(agent.model) else {"logits_to_keep": 1}
    logits: Tensor = agent.model(input_ids=ids, use_cache=False, **last).logits[:, -1]
    return logits


def _generation(request: GenerationRequest, sampled: Sampled, text: str) -> Generation:
    return Generation(
        request.request_id,
        tuple(sampled.token_ids),
        text,
        tuple(sampled.policy_logprobs),
        tuple(sampled.sampling_logprobs),
        sampled.finish_reason,
    )
