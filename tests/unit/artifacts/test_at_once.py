"""Files that several campaigns of one home write at the same moment."""

import threading
from collections.abc import Callable
from pathlib import Path

from flows.store.bucket import home_id
from hacrl_core.artifacts.files import replace_synced


def at_once(work: Callable[[int], str], threads: int = 8) -> list[str]:
    """Run the work in threads that begin together, and return what each returned or raised."""
    barrier = threading.Barrier(threads)
    found: list[str] = [""] * threads

    def run(number: int) -> None:
        barrier.wait()
        try:
            found[number] = work(number)
        except OSError as problem:
            found[number] = repr(problem)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return found


def test_a_new_home_gets_one_name_whoever_asks_first(tmp_path: Path) -> None:
    for attempt in range(20):
        root = tmp_path / str(attempt)
        names = at_once(lambda _, root=root: home_id(root))  # type: ignore[misc]
        assert len(set(names)) == 1, names
        assert [path.name for path in root.iterdir()] == ["home-id"]


def test_a_file_that_many_replace_is_whole_and_of_one_of_them(tmp_path: Path) -> None:
    path = tmp_path / "roots.json"

    def replace(number: int) -> str:
        for _ in range(10):
            replace_synced(path, str(number) * 1000)
        return "done"

    assert at_once(replace) == ["done"] * 8
    assert len(set(path.read_text())) == 1
    assert [left.name for left in tmp_path.iterdir()] == ["roots.json"]
