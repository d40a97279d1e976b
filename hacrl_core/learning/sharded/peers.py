"""Ranks as spawned processes on this machine: both ends of their pipe."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from hacrl_core.errors import EngineError
from hacrl_core.learning.sharded.ranks import SILENCE, News, Peer, join, portable, use_interface


class SpawnedPeer:
    """A rank in a process that this one has spawned."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self._pipe = pipe

    def send(self, task: bytes) -> None:
        """Hand over a task; a peer that is gone says so in its news."""
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(task)

    def news(self) -> News | None:
        """Return what the process has sent, or that it has ended."""
        try:
            if self._pipe.poll():
                heard: News = pickle.loads(self._pipe.recv_bytes())
                return heard
        except (EOFError, OSError):
            self.process.join(5.0)
        if self.process.is_alive():
            return None
        code = self.process.exitcode
        return News("died", f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}")

    def kill(self) -> None:
        """End the process, and collect it."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def spawn_rank(index: int, count: int, address: str, port: int, device: str) -> Peer:
    """Start a rank as a process on this machine; it ends with this one."""
    import torch

    if device != "cpu" and torch.cuda.device_count() < count:
        raise EngineError(
            f"update.ranks {count}: needs as many GPUs, and this process sees {torch.cuda.device_count()}; give the "
            "agent that many under gpus, or lower update.ranks"
        )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    place = (index, count, address, port, device)
    process = context.Process(
        target=_serve, args=(theirs, os.getpid(), place, torch.get_num_threads()), name=f"rank {index}", daemon=True
    )
    process.start()
    theirs.close()
    return SpawnedPeer(process, ours)


def _serve(pipe: Connection, parent: int, place: tuple[int, int, str, int, str], threads: int) -> None:
    """Run in the peer: join the group, then take a task, run it and answer, until the pipe ends or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the campaign decides
    _end_with(parent)
    import torch
    import transformers
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    index, count, address, port, device = place
    use_interface(address)
    try:
        _say(pipe, News("ready"))
        store = TCPStore(address, port, is_master=False, timeout=SILENCE)
        rank = join(index, count, store, device)
        while True:
            pickle.loads(pipe.recv_bytes())(rank)
            _say(pipe, News("done"))
    except EOFError:
        os._exit(0)
    except BaseException as problem:
        _say(pipe, News("error", portable(problem)))
        os._exit(1)  # at once: the others wait for this rank in a collective


def _say(pipe: Connection, news: News) -> None:
    with contextlib.suppress(OSError):
        pipe.send_bytes(pickle.dumps(news))


def _end_with(parent: int) -> None:
    """End this process soon after its parent is gone, however that happened."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
