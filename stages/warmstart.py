"""warmstart: corpus + architecture → a first agent, taught to partial competence. For the tiny agents of the demo."""

from collections.abc import Mapping
from typing import Annotated

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import IdentityUnlessDefault, StrictConfig
from hacrl_core.config.problems import ArithmeticConfig, TaskProblems
from hacrl_core.config.warmstart import WarmstartConfig
from stages.spec import Context, Metrics, OutFolder, Result, Stage, required_seed


class WarmstartSlice(StrictConfig):
    """What a warm start reads of the config."""

    warmstart: WarmstartConfig
    corpus: ArithmeticConfig | TaskProblems
    content_digest: Annotated[str, IdentityUnlessDefault] = ""  # of a task's problems


def run(
    inputs: Mapping[str, ArtifactRef], config: WarmstartSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Train a new agent on worked answers."""
    from hacrl_core.agents.warmstart import warm_start

    def progress(done: int, total: int, metrics: Metrics) -> None:
        context.progress(done, total, f"steps, loss {metrics['loss']:.2f}" if "loss" in metrics else "steps")

    found = warm_start(config.warmstart, config.corpus, required_seed("warmstart", seed), out.path, progress)
    return Result({f"warmstart/{name}": value for name, value in found.items()})


STAGE = Stage("warmstart", 1, WarmstartSlice, run)
