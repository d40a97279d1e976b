"""Two gloo ranks against one process, on the same updates: wall and CPU seconds, as ratios of medians in one run.

Both use one thread per process, so two ranks have two cores where one process has one. On the CPU that shows what
gathering, reducing and waiting for one another cost; it says nothing of GPUs. One process is timed before the ranks and
after them. CPU seconds do not depend on what else runs: those of the ranks together show the work that ranks add, and
those of the busiest rank the speed-up that two free cores could give.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from hacrl_core.agents.agent import load_agent
from hacrl_core.algorithm.objective import Objective, ObjectiveRows, make_objective
from hacrl_core.config.algorithm import preset
from hacrl_core.config.training import UpdateConfig
from hacrl_core.learning.sequences import TrainSequence
from hacrl_core.learning.sharded.policy import Numerics, load_sharded
from hacrl_core.learning.sharded.ranks import Rank, RankGroup
from hacrl_core.learning.sharded.trainer import ShardedTrainer
from hacrl_core.learning.trainer import Trainer

VOCABULARY = 8192
Took = tuple[float, float]  # wall and CPU seconds


def checkpoint(folder: Path, hidden: int, layers: int) -> None:
    """Write a Qwen3 with random weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def work(rows: int) -> tuple[list[TrainSequence], Objective]:
    """Return responses of 32 to 256 tokens, each to a prompt of its own, and HACPO's objective for them."""
    rng = np.random.default_rng(0)

    def some(tokens: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(0, VOCABULARY, tokens))

    sequences = [TrainSequence(some(32), some(int(rng.integers(32, 257)))) for _ in range(rows)]
    advantage = torch.from_numpy(rng.normal(size=rows))
    level = torch.full((rows,), -9.0, dtype=torch.float64)
    own = torch.arange(rows) % 2 == 0
    ones = torch.ones(rows, dtype=torch.float64)
    old = [torch.full((len(s.response_token_ids),), -9.0) for s in sequences]
    table = ObjectiveRows(level, advantage, own, ones, ones, float(rows), old)
    wide = preset("hacpo", self_clip_low=0.9, self_clip_high=0.9, cross_clip_delta=0.9)
    return sequences, make_objective(table, update_index=1, config=wide)


@dataclass(frozen=True)
class Updates:
    """Time some updates on ranks."""

    folder: Path
    config: UpdateConfig
    rows: int
    times: int

    def __call__(self, rank: Rank) -> list[list[Took]]:
        """Return the seconds of each update, rank by rank."""
        trainer = ShardedTrainer(load_sharded(rank, self.folder, "", Numerics()), self.config)
        return rank.gather(timed(trainer, self.rows, self.times))


def timed(trainer: Trainer | ShardedTrainer, rows: int, times: int) -> list[Took]:
    """Return the wall and CPU seconds of each of some updates, after one that is not counted."""
    sequences, objective = work(rows)
    seconds = []
    for _ in range(times + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.step(sequences, objective)
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    return seconds[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--times", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        checkpoint(folder, asked.hidden, asked.layers)
        config = UpdateConfig(learning_rate=1e-6, token_budget=1024, ranks=asked.ranks)
        words = transformers.PreTrainedTokenizerFast  # the trainer of one process wants a tokenizer: any will do
        from tokenizers import Tokenizer, models

        words(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), eos_token="a").save_pretrained(
            folder
        )
        agent = load_agent(folder)
        parameters = sum(p.numel() for p in agent.model.parameters())
        trainer = Trainer(agent, config)
        alone = timed(trainer, asked.rows, asked.times)
        group = RankGroup(asked.ranks, "cpu")
        together = group.run(Updates(folder, config, asked.rows, asked.times))
        group.close()
        alone += timed(trainer, asked.rows, asked.times)
    print(
        f"Qwen3 of {parameters / 1e6:.1f}M parameters, {asked.rows} responses of 32 to 256 tokens, float32, one thread "
        f"per process, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
        f"medians of {len(alone)} and {asked.times}"
    )
    report(alone, together)


def report(alone: list[Took], together: list[list[Took]]) -> None:
    """Print both and their ratios; ``together`` is by rank."""
    count = len(together)
    wall, cpu = (statistics.median(column) for column in zip(*alone, strict=True))
    many = statistics.median(took for took, _ in together[0])
    each = [statistics.median(busy for _, busy in rank) for rank in together]
    print(f"one process    {wall:7.2f} s wall {cpu:7.2f} s CPU   wall {[round(took, 2) for took, _ in alone]}")
    print(
        f"{count} gloo ranks   {many:7.2f} s wall {sum(each):7.2f} s CPU   by rank {[round(busy, 2) for busy in each]}"
    )
    print(f"speed-up       {wall / many:7.2f} x wall {cpu / max(each):7.2f} x by the busiest rank's CPU")
    print(f"work           {sum(each) / cpu:7.2f} x CPU seconds of one process, all ranks together")


if __name__ == "__main__":
    main()
