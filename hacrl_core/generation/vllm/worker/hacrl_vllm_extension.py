"""Mixed into vLLM's workers, one per GPU, by ``--worker-extension-cls hacrl_vllm_extension.WeightSwap``."""

from typing import Any


class WeightSwap:
    """New weights into a running engine, and the proof that they are there."""

    model_runner: Any
    reload_weights: Any  # of vLLM's worker, which this class is mixed into

    def hacrl_swap_weights(self, path: str) -> None:
        """Load the checkpoint folder ``path`` in place.

        On CPU vLLM multiplies by packed copies of the weights. ``reload_weights`` packs a layer again when the
        checkpoint has weights for it; a head tied to the input embeddings has none of its own, so its packed copy would
        stay that of the old policy, and every token would be sampled from a mixture of two policies. It is packed again
        here.
        """
        self.reload_weights(weights_path=path)
        from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found]
            ParallelLMHead,
            UnquantizedEmbeddingMethod,
        )

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                module.quant_method.process_weights_after_loading(module)

    def hacrl_forget_weights(self) -> None:
        """Make the weights of a sleeping CPU build unusable.

        On a GPU they are gone. The CPU build cannot give memory back; a wake-up without a swap must be as wrong there.
        """
        import torch

        for parameter in self.model_runner.get_model().parameters():
            if parameter.device.type == "cpu" and parameter.is_floating_point():
                with torch.no_grad():
                    parameter.fill_(float("nan"))

    def hacrl_differing_weights(self, path: str) -> list[str]:
        """The parameters in memory that are not those of the checkpoint folder ``path``."""
        from hacrl_vllm_proof import differing  # type: ignore[import-not-found]

        found: list[str] = differing(self.model_runner.get_model(), path)
        return found
