"""Writes a first campaign, with a task and its test where asked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.scaffold.campaign import OWN, campaign_text, choose_start, read_origins
from flows.scaffold.task import task_text, test_text
from hacrl_core.config.loading import NAME_PATTERN
from hacrl_core.errors import ConfigError


@dataclass(frozen=True)
class Written:
    """The files of a new campaign."""

    config: Path
    task: Path | None
    test: Path | None

    @property
    def files(self) -> list[Path]:
        """All files, the campaign first."""
        return [path for path in (self.config, self.task, self.test) if path is not None]


def write_campaign(name: str, task: str, agents: Sequence[str], folder: Path) -> Written:
    """Write the files of a campaign into a folder; a file that exists is never overwritten."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"name {name!r}: use letters, digits, _ . and -, and begin with a letter or a digit")
    # The task is a Python module.
    module = re.sub(r"\W", "_", name).lower() + "_task"
    if module[0].isdigit():
        module = f"task_{module}"
    task_file, test_file = f"{module}.py", f"test_{module}.py"
    origins = read_origins(agents)
    start = choose_start(task, task_file, origins)
    config_file = f"{name}.yaml"
    texts = {config_file: campaign_text(name, config_file, start, origins)}
    if task == OWN:
        texts[task_file] = task_text(name, task_file)
        texts[test_file] = test_text(task_file, test_file)
    there = [file for file in texts if (folder / file).exists()]
    if there:
        raise ConfigError(f"{folder / there[0]}: exists already; give another name, or remove it first")
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    own = task == OWN
    return Written(folder / config_file, folder / task_file if own else None, folder / test_file if own else None)
