"""share: rollouts or scores → the columns of them that other parties may see.

This stage is the whitelist. What a party sends is the file of such an artifact, and a column that the two tables do not
have cannot leave it.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import NonNegativeInt

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.base import StrictConfig
from hacrl_core.contracts.tables import ANSWERS, CLAIMS, SCORES, read_answers, read_table
from hacrl_core.exchange.footers import remove_writer
from stages.spec import Context, OutFolder, Result, Stage

SharedKind = Literal["answers", "claims"]
# The input of each kind.
SOURCES: dict[SharedKind, str] = {"answers": "rollouts", "claims": "scores"}


class ShareSlice(StrictConfig):
    """What sharing reads of the config."""

    agent_id: str
    iteration: NonNegativeInt
    kind: SharedKind


def run(
    inputs: Mapping[str, ArtifactRef], config: ShareSlice, seed: int | None, out: OutFolder, context: Context
) -> Result:
    """Copy the columns that may leave, and nothing else."""
    source = inputs[SOURCES[config.kind]].path
    if config.kind == "answers":
        table = read_answers(source)
        out.write(ANSWERS, {name: table[name].to_pylist() for name in ANSWERS.fields.names})
        remove_writer(out.path / "answers.parquet")
        return Result({"share/answers": float(table.num_rows)})
    own = [row for row in read_table(source / "scores.parquet", SCORES).to_pylist() if row["is_own"]]
    out.write(
        CLAIMS,
        {
            "rollout_id": [row["rollout_id"] for row in own],
            "mean_logprob": [row["mean_logprob"] for row in own],
            "tokens": [len(row["token_ids"]) for row in own],
        },
    )
    remove_writer(out.path / "claims.parquet")
    return Result({"share/claims": float(len(own))})


STAGE = Stage("share", 2, ShareSlice, run)
