"""What the benchmarks of generation and of whole iterations share: the small model, the shape of a group, and a
figure's form.
"""

import statistics
from typing import Any

PROMPT_TOKENS = 16
GROUP = 8

TINY = {  # 0.9M parameters
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def figure(
    name: str,
    cpu_seconds: dict[str, list[float]],
    seconds: dict[str, list[float]],
    target: float,
    unit: str,
    rates: dict[str, float],
) -> dict[str, Any]:
    (theirs, ours), (their_clock, our_clock) = (
        [statistics.median(times) for times in sides.values()] for sides in (cpu_seconds, seconds)
    )
    ratio, by_the_clock = theirs / ours, their_clock / our_clock
    shown = ", ".join(f"{side} {rate:,.4g}" for side, rate in rates.items())
    print(f"{name}: {ratio:.2f} x (target {target}), {by_the_clock:.2f} x by the clock; {unit}: {shown}")
    return {
        "name": name,
        "value": round(ratio, 3),
        "target": target,
        "met": min(ratio, by_the_clock) >= target,  # the clock counts waiting for the disk, too
        "by_the_clock": round(by_the_clock, 3),
        unit: {side: round(rate, 2) for side, rate in rates.items()},
    }
