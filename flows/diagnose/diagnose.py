"""Applies all rules to a campaign and prints what they find."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from flows.diagnose import answers, measuring, responses, training
from flows.diagnose.evidence import Evidence, read_evidence
from flows.diagnose.finding import Finding
from flows.home import Home
from flows.record.history import History, read_history
from flows.record.record import find_campaign
from hacrl_core.artifacts import open_store
from hacrl_core.printable import printable

# Before so many iterations there is too little to judge by.
ITERATIONS = 3


def find_causes(evidence: Evidence) -> list[Finding]:
    """Return what the rules find, roots first."""
    found: list[Finding] = []
    for agent in evidence.agents:
        rows = evidence.by_agent[agent]
        for judge in (*responses.RULES, *answers.RULES):
            found += judge(evidence, agent, rows) if rows else ()
        for rule in training.RULES:
            found += rule(evidence, agent)
    for look in measuring.RULES:
        found += look(evidence)
    return sorted(found, key=lambda finding: finding.order)


def diagnose(history: History) -> list[Finding]:
    """Return the findings of a campaign, roots first; none before its first iteration."""
    return find_causes(read_evidence(history)) if history.done else []


def show_diagnosis(console: Console, home: Home, name: str | None) -> list[Finding]:
    """Print why a campaign does not learn; return the findings."""
    folder = find_campaign(home, name)
    history = read_history(open_store(home.store), folder)
    found = diagnose(history)
    done = f"{history.done} of {history.config.iterations} iterations"
    if not history.done:
        console.print(f"{folder.name}: no iteration is complete yet; nothing to judge by")
    elif not found:
        console.print(f"{folder.name}, {done}: nothing that would keep it from learning was found")
    else:
        console.print(
            f"{folder.name}, {done}: {len(found)} {'finding' if len(found) == 1 else 'findings'}, roots first\n"
        )
        print_findings(console, found)
    return found


def print_findings(console: Console, found: Sequence[Finding]) -> None:
    """Print findings with cause, remedy and evidence."""
    for number, finding in enumerate(found, start=1):
        whose = f"{finding.agent}: " if finding.agent else ""
        console.print(Text.assemble((f"{number}. ", "bold"), (f"{whose}{finding.what}", "bold")), soft_wrap=True)
        console.print(Text(f"   cause:    {finding.cause}"), soft_wrap=True)
        console.print(Text.assemble("   do this:  ", (finding.remedy, "cyan")), soft_wrap=True)
        for line in finding.evidence:
            console.print(Text(f"   {printable(line)}", style="dim"), soft_wrap=True)
        console.print()


def in_one_line(finding: Finding) -> str:
    """Return a finding as a warning of a running campaign."""
    whose = f"{finding.agent}: " if finding.agent else ""
    return f"{whose}{finding.what}; likely cause: {finding.cause}; {finding.remedy} (hacrl diagnose shows the evidence)"
