"""A campaign's driver as a process that can be killed: ``python -m tests.cluster.driver HOME CONFIG.json``."""

import sys
from pathlib import Path

from rich.console import Console

from flows.home import Home
from flows.run.launch import open_campaign, run_stages
from flows.run.runner import ThreadRunner
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.errors import HacrlError


def main(home: str, config: str) -> int:
    """Run or resume the campaign without Prefect; exit code 0 when it is complete."""
    campaign = CampaignConfig.model_validate_json(Path(config).read_text())
    try:
        with open_campaign(campaign, Home(Path(home)), Console()) as opened:
            run_stages(opened, ThreadRunner)
    except HacrlError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
