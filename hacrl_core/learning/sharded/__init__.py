"""Scoring and training one model over several processes with FSDP2, which is part of torch.

``update.ranks`` asks for it. The process of the stage is rank 0 and starts the others (`ranks`, `peers`). Every rank
builds the same plan, takes its share of the rows (`dealing`), and runs them through the sharded model (`policy`), whose
slices it has read itself (`loading`). `trainer` and `scoring` do what their namesakes outside do on one process;
`saving` writes one version, whose bytes do not depend on who wrote them.

Bytes on each of R ranks, for N parameters of which T are trained, V·H the head (and the embedding, where they are
tied), and P parameters in the largest layer:

    score     4·N/R                       float32 slices of the weights
              + w·P + 4·(root)            one gathered layer (w = 4, bf16 2; twice that while the next one is fetched),
                                          and the gathered root: embeddings, last norm and head, 4·V·H tied, 8·V·H not
              + activations and logits of a microbatch, as on one process
    update    4·N/R + 12·T/R              slices of weights, gradient and AdamW's two moments
              + w·P + 4·(root)            gathered, as in score
              + 4·P + 4·(trained root)    gradients of one layer, and of the root, before they are reduced
              + 4·V·H                     the fused loss's own buffer for the head's gradient, where the head is trained
              + activations and logits of a microbatch
    offload   slices and moments are in the host's memory: only what is gathered stays on the device

``autocast: bf16`` needs no cache of cast weights, which torch's autocast keeps on one process (2 bytes per parameter of
the body). The residual stream between layers is bfloat16 then, and float32 on one process.
"""
