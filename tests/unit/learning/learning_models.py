"""Tiny models, sequences and objectives shared by the tests of this folder."""

from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from hacrl_core.agents.agent import Agent
from hacrl_core.learning.fused import Objective
from hacrl_core.learning.sequences import TrainSequence

VOCABULARY = 53
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 2,
}


def tiny_model(kind: str = "llama", *, tied: bool = False, **changes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    if kind == "gpt2":
        config: transformers.PretrainedConfig = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=128,
            n_embd=32,
            n_layer=2,
            n_head=2,
            eos_token_id=1,
            bos_token_id=0,
            resid_pdrop=0.1,
        )
    else:
        classes = {
            "llama": transformers.LlamaConfig,
            "mistral": transformers.MistralConfig,
            "qwen3": transformers.Qwen3Config,
            "gemma2": transformers.Gemma2Config,
            "gemma3": transformers.Gemma3TextConfig,
            "cohere": transformers.CohereConfig,
            "granite": transformers.GraniteConfig,
        }
        config = classes[kind](**{**_SMALL, **changes}, tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {"<bos>": 0, "<end>": 1, "<pad>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def tiny_agent(kind: str = "llama", **changes: object) -> Agent:
    return Agent(tiny_model(kind, **changes), tiny_tokenizer(), (1,), Path("tiny"))  # type: ignore[arg-type]


def random_sequences(count: int, seed: int = 0, longest: int = 20) -> list[TrainSequence]:
    rng = np.random.default_rng(seed)

    def some(n: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(3, VOCABULARY, n))

    return [TrainSequence(some(rng.integers(1, 9)), some(rng.integers(1, longest + 1))) for _ in range(count)]


def naive_logprobs(
    model: transformers.PreTrainedModel, sequence: TrainSequence, temperature: float = 1.0
) -> torch.Tensor:
    """One sequence alone, through the model's own logits."""
    ids = torch.tensor([[*sequence.prompt_token_ids, *sequence.response_token_ids]])
    logits = model(input_ids=ids).logits[0, len(sequence.prompt_token_ids) - 1 : -1] / temperature
    targets = torch.tensor(sequence.response_token_ids)
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def sequence_objective(
    advantage_B: torch.Tensor, old_B: torch.Tensor, weight_B: torch.Tensor | None = None, total: float | None = None
) -> Objective:
    """GSPO-like: clipped sequence-level ratio, divided by the weight of the whole minibatch."""
    weights = torch.ones_like(advantage_B) if weight_B is None else weight_B

    def objective(
        logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, rows_B: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean_B = (logprobs_BT * mask_BT).sum(1) / mask_BT.sum(1)
        ratio_B = (mean_B - old_B[rows_B].to(mean_B)).clamp(-10, 10).exp()
        a_B = advantage_B[rows_B].to(mean_B)
        gain_B = torch.minimum(ratio_B * a_B, ratio_B.clamp(0.8, 1.2) * a_B)
        loss = -(gain_B * weights[rows_B].to(mean_B)).sum() / (total or float(weights.sum()))
        return loss, {"ratio": ratio_B.detach(), "mean_logprob": mean_B.detach()}

    return objective


def token_objective(advantage_B: torch.Tensor, total: int, kl: float = 0.1) -> Objective:
    """GRPO-like: a coefficient per token, with a k3 KL to a made-up reference."""

    def objective(
        logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, rows_B: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_ratio = (logprobs_BT + 3.5).clamp(-2, 2)
        gap = -3.0 - logprobs_BT.clamp(-8, 0)
        tokens = log_ratio.exp() * advantage_B[rows_B].to(logprobs_BT)[:, None] - kl * (gap.exp() - gap - 1)
        per_row = (tokens * mask_BT).sum(1) / mask_BT.sum(1)
        return -per_row.sum() / total, {"gain": per_row.detach()}

    return objective
