"""Ranks that die: the stage ends soon, says who died, is retried, and gives what it gives undisturbed."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from flows.home import Home
from flows.run.events import Listener
from flows.run.executors import ProcessExecutor
from flows.run.launch import open_campaign, run_stages
from flows.run.runner import ThreadRunner
from hacrl_core.artifacts import Store
from hacrl_core.errors import RankDied
from stages.spec import Outcome, StageCall
from tests.flow.conftest import TINY, tiny
from tests.flow.homes import digests
from tests.patience import patience
from tests.ranks.tasks import Train, TrainForEver, sequences, settings

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + patience(60)
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


@pytest.mark.parametrize("ranks", [2, 3])
def test_kill_9_in_mid_step_ends_the_task_in_under_a_minute(group, checkpoint, tmp_path, ranks):
    folder = checkpoint("llama", tied=True)
    rows = sequences()
    undisturbed = group(ranks).run(Train(folder, settings(ranks=ranks), rows, gradients=False))
    killed_at = []

    def kill() -> None:
        wait_for(tmp_path / "training")
        time.sleep(0.3)
        killed_at.append(time.monotonic())
        os.kill(victims[-1].process.pid, signal.SIGKILL)

    victims = group(ranks).peers
    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankDied, match=rf"update ada #3: rank {ranks - 1} of {ranks} died \(killed by SIGKILL\)"):
        group(ranks).run(
            TrainForEver(Train(folder, settings(ranks=ranks), rows), tmp_path / "training"), name="update ada #3"
        )
    ended = time.monotonic() - killed_at[0]
    killer.join()
    assert ended < max(60.0, patience(10))
    assert not any(peer.process.is_alive() for peer in victims)
    again = group(ranks).run(Train(folder, settings(ranks=ranks), rows, gradients=False))
    assert again["steps"][0].loss == undisturbed["steps"][0].loss


def test_ranks_end_with_the_process_that_started_them(checkpoint, tmp_path):
    folder = checkpoint("llama", tied=True)
    script = (
        "from pathlib import Path\n"
        "from hacrl_core.learning.sharded.ranks import RankGroup\n"
        "from tests.ranks.tasks import Train, TrainForEver, sequences, settings\n"
        "if __name__ == '__main__':\n"
        "    import sys\n"
        "    group = RankGroup(2, 'cpu')\n"
        "    Path(sys.argv[2], 'pid').write_text(str(group.peers[0].process.pid))\n"
        "    train = Train(Path(sys.argv[1]), settings(ranks=2), sequences())\n"
        "    group.run(TrainForEver(train, Path(sys.argv[2], 'training')))\n"
    )
    (tmp_path / "leader.py").write_text(script)
    command = [sys.executable, str(tmp_path / "leader.py"), str(folder), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    leader = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        wait_for(tmp_path / "training")
        peer = psutil.Process(int((tmp_path / "pid").read_text()))
    finally:
        leader.kill()
        leader.wait()
    gone, alive = psutil.wait_procs([peer], timeout=patience(20))
    assert gone
    assert not alive


class KillsARank:
    """Runs calls in worker processes, and kills a rank during the first update."""

    def __init__(self, inner: ProcessExecutor) -> None:
        self.inner = inner
        self.killed: list[int] = []
        self.warnings: list[str] = []

    def run(self, call: StageCall, listener: Listener) -> Outcome:
        if call.stage == "update" and not self.killed:
            threading.Thread(target=self._kill, daemon=True).start()
        return self.inner.run(call, Listener())

    def _kill(self) -> None:
        """Wait for the rank, which may be there from scoring, and for the update to be under way."""
        deadline = time.monotonic() + patience(60)
        while not self.killed and time.monotonic() < deadline:
            time.sleep(0.05)
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if "spawn_main" in " ".join(process.cmdline()) and process.ppid() != os.getpid():
                        self.killed.append(process.pid)
                        process.kill()
                        return

    def close(self, *, now: bool) -> None:
        self.inner.close(now=now)


def test_a_campaign_retries_the_stage_whose_rank_was_killed(tmp_path):
    config = tiny(
        iterations=1, update={**TINY["update"], "ranks": 2}, evaluate={}, agents={"ada": TINY["agents"]["ada"]}
    )
    found = {}
    for name in ("quiet", "killed"):
        home = Home(tmp_path / name)
        executor = ProcessExecutor(config, Store(home.store))
        chosen = KillsARank(executor) if name == "killed" else executor
        with open_campaign(config, home, Console(quiet=True)) as campaign:
            run_stages(campaign, ThreadRunner, lambda *_, chosen=chosen: chosen)
        found[name] = digests(home, config.name)
        if isinstance(chosen, KillsARank):
            assert len(chosen.killed) == 1
            log = (home.root / "campaigns" / config.name / "log.txt").read_text()
            assert "rank 1 of 2 died (killed by SIGKILL)" in log
            assert "trying again" in log
    assert found["quiet"] == found["killed"]
