"""``hacrl doctor --config CONFIG --try``: a few real answers of every agent, judged, before a night of training."""

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from flows.diagnose.diagnose import print_findings
from flows.diagnose.evidence import Evidence, Response, read_prompts, read_responses
from flows.diagnose.finding import Finding
from flows.diagnose.responses import RULES
from flows.home import Home
from flows.run.runner import Done
from flows.stage_calls import StageCalls
from hacrl_core.artifacts import open_store
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.printable import printable
from stages.runner import run_stage
from stages.spec import Context, StageCall

PROMPTS, SAMPLES = 6, 4
# Answers of each agent that are printed.
SHOWN = 3


def try_campaign(console: Console, config: CampaignConfig, home: Home) -> int:
    """Print what every agent answers to a few prompts and what is wrong with it; return 1 where something is.

    The agents' first versions go into the store, where the campaign will find them.
    """
    rows = sample_answers(console, config, home)
    evidence = evidence_of(config, rows)
    found: list[Finding] = []
    for agent in config.agents:
        own = evidence.by_agent[agent]
        _show(console, agent, own)
        for rule in RULES:
            found += rule(evidence, agent, own)
    if not found:
        console.print("no rule finds a fault in how the agents are asked, answer and are judged")
        return 0
    console.print()
    print_findings(console, sorted(found, key=lambda finding: finding.order))
    return 1


def sample_answers(console: Console, config: CampaignConfig, home: Home) -> list[Response]:
    """Make the agents, let each answer a few prompts of iteration 0, and judge the answers."""
    changes = {
        "prompts_per_iteration": min(PROMPTS, config.prompts_per_iteration),
        "samples_per_prompt": min(SAMPLES, config.samples_per_prompt),
    }
    small = config.model_copy(update=changes)
    calls, store, context = StageCalls(small), open_store(home.store), Context()

    def run(planned: StageCall) -> Done:
        console.print(f"{planned.title} …", style="dim")
        return Done(planned, run_stage(store, planned.bound(), context))

    present = small.present(0)
    origins = {agent: run(calls.origin(agent)) for agent in present}
    prompts = run(calls.sample(dict(origins), 0))
    texts, golds = read_prompts([prompts.outcome().ref.path / "prompts.parquet"])
    rows: list[Response] = []
    for agent in present:
        rollouts = run(calls.generate(agent, origins[agent], prompts, 0))
        verdicts = run(calls.verify(agent, rollouts, prompts, 0, dict(origins)))
        places = rollouts.outcome().ref.path / "rollouts.parquet", verdicts.outcome().ref.path / "verdicts.parquet"
        rows += read_responses(agent, 0, *places, texts, golds)
    console.print()
    return rows


def evidence_of(config: CampaignConfig, rows: Iterable[Response]) -> Evidence:
    """Return the evidence of a trial: responses, and the shares of their verdicts."""
    rows = list(rows)
    metrics: dict[tuple[str, str], dict[str, list[float]]] = {}
    for agent in config.agents:
        own = [row for row in rows if row.agent == agent]
        kinds = Counter(row.verdict for row in own)
        shares = {f"verify/{kind}_share": [count / len(own)] for kind, count in kinds.items()}
        metrics["verify", agent] = shares
    return Evidence(config, 0, metrics, rows, {}, [], {})


def _show(console: Console, agent: str, rows: list[Response]) -> None:
    kinds = Counter(row.verdict for row in rows)
    console.print(Text.assemble((agent, "bold"), f": {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}"))
    for row in rows[:: max(1, len(rows) // SHOWN)][:SHOWN]:
        console.print(Text(f"  {printable(row.question)[:100]!r}", style="dim"), soft_wrap=True)
        end = " (cut off)" if row.cut_off else ""
        console.print(
            Text(f"    {printable(row.text)[:200]!r}{end} → {row.verdict}, gold {row.gold!r}"), soft_wrap=True
        )
