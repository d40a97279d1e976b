"""Looks at another party's answers with a learner's own eyes, before the learner learns from them."""

from collections import defaultdict

from hacrl_core.artifacts import ArtifactRef
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.contracts.tables import ANSWERS, CLAIMS, SCORES, VERDICTS, read_answers, read_table
from hacrl_core.exchange.messages import Message, Reason, Refused
from hacrl_core.exchange.plausibility import Answer, Finding, examine


def inspect(
    config: CampaignConfig,
    learner: str,
    message: Message,
    answers: ArtifactRef,
    claims: ArtifactRef | None,
    scores: ArtifactRef,
    rollouts: ArtifactRef,
    verdicts: ArtifactRef,
) -> list[Finding]:
    """Return what the checks of ``plausibility`` say; raise Refused where one of them would alarm.

    ``scores`` and ``rollouts`` are the learner's: what it thinks of the answers, and what it answered itself.
    ``verdicts`` are those on the other party's answers that this process computed.
    """
    generate = config.generation(message.agent)
    own = config.generation(learner)
    whole = all(g.top_p == 1 and g.top_k == 0 for g in (generate, own))
    theirs = _answers(answers, claims, scores, verdicts)
    findings = examine(theirs, _own_texts(rollouts), frequencies=whole) if theirs else []
    strange = [finding for finding in findings if finding.name == "alien" and finding.chance == 0.0]
    by_chance = [finding for finding in findings if finding.name != "alien"]
    worst = min(by_chance, key=lambda finding: finding.chance, default=None)
    if worst is not None and worst.chance < config.exchange.alarm:
        # Only the bound on the mass is arithmetic; all others are a matter of chance.
        reason: Reason = "lie" if worst.name == "mass" else "implausible"
        chance = f"an honest party looks like this less than once in {1 / max(worst.chance, 1e-12):.0g} rounds"
        raise Refused(message.party, reason, f"{message.label}: {worst.what}; {chance}")
    if strange:
        # Honest parties can be like this: only the round is left out.
        raise Refused(message.party, "alien", f"{message.label}: {strange[0].what}")
    return findings


def _answers(
    answers: ArtifactRef, claims: ArtifactRef | None, scores: ArtifactRef, verdicts: ArtifactRef
) -> list[Answer]:
    """Join a party's answers with its claims and the learner's scores.

    Those that were cut off are among them: their author says so itself, and learners learn from them.
    """
    claimed = {}
    if claims is not None:
        rows = read_table(claims.path / "claims.parquet", CLAIMS).to_pylist()
        claimed = {row["rollout_id"]: row["mean_logprob"] * row["tokens"] for row in rows}
    table = read_table(scores.path / "scores.parquet", SCORES).select(
        ["rollout_id", "token_ids", "mean_logprob", "truncated"]
    )
    scored = {row["rollout_id"]: row for row in table.to_pylist()}
    judged = read_table(verdicts.path / "verdicts.parquet", VERDICTS).select(["rollout_id", "reward"]).to_pylist()
    right = {row["rollout_id"] for row in judged if row["reward"] > 0}
    found = []
    for row in read_table(answers.path / "answers.parquet", ANSWERS).to_pylist():
        score = scored.get(row["rollout_id"])
        if score is None or (claims is not None and row["rollout_id"] not in claimed):
            continue
        tokens = len(score["token_ids"])
        found.append(
            Answer(
                row["prompt_id"],
                row["response_text"],
                claimed.get(row["rollout_id"]),
                score["mean_logprob"] * tokens,
                tokens,
                row["rollout_id"] in right,
                score["truncated"],
            )
        )
    return found


def _own_texts(rollouts: ArtifactRef) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = defaultdict(list)
    for row in read_answers(rollouts.path).to_pylist():
        texts[row["prompt_id"]].append(row["response_text"])
    return texts
