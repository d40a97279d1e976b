"""What the processes of a profiled run did (``hacrl run --profile``), as rows of a bar chart."""

from flows.home import Home
from flows.record.history import History
from flows.record.trace import WAITING, newest_trace, where_time_went

# A label and its parts (agent, seconds); agent -1 is what belongs to no agent.
Rows = tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
PROFILE_NOTE = (
    "The last profiled run, from its trace. Stages without their input and output; inputs, publish, download, upload; "
    "waiting: calls that were ready before their process was; idle: processes without work. MLflow and Prefect: what "
    "threads of the campaign's process told them meanwhile, beside the stages and in no other row."
)


def rows_of_profile(history: History) -> Rows:
    """Return the seconds of each kind of work and agent, the largest first; nothing where no run was profiled."""
    trace = newest_trace(Home(history.store.root.parent).campaign(history.config.name))
    numbers = {agent: number for number, agent in enumerate(history.agents)}
    rows: dict[str, dict[int, float]] = {}
    for spent in where_time_went(trace) if trace is not None else ():
        for kind, seconds in spent.seconds.items():
            waits = spent.process == WAITING
            # A process is called ada, or ada/check; calls wait for one of them.
            process = kind.removeprefix("waits for ") if waits else spent.process
            row, agent = rows.setdefault("waiting" if waits else kind, {}), numbers.get(process.partition("/")[0], -1)
            row[agent] = row.get(agent, 0.0) + seconds
    ordered = sorted(rows.items(), key=lambda item: -sum(item[1].values()))
    return tuple((kind, tuple(sorted(parts.items()))) for kind, parts in ordered)
