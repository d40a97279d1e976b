"""The queue of prompts behind several engines: workers here are threads' toys that write, stall and die on command."""

import math
import queue
import threading
from collections import Counter

import pytest

from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.generation.protocols import GenerationRequest, SamplingParams
from hacrl_core.generation.vllm import replicas
from hacrl_core.generation.vllm.backend import Response
from hacrl_core.generation.vllm.process import WorkerDied, WorkerFailed
from hacrl_core.generation.vllm.replicas import PromptQueue, ReplicaBackend, gpus_of_replica
from tests.patience import patience

SAMPLES = 4
REQUESTS = [GenerationRequest(f"{p}/{s}", (p, p + 1), s) for p in range(12) for s in range(SAMPLES)]


class Toy:
    """Answers like a worker: so many seconds per response, and an end after so many of them.

    The seconds are counted, not waited for: whoever has used fewer of them so far writes first.
    """

    turns = threading.Condition()

    made: "list[Toy]" = []  # noqa: RUF012
    plans: "list[tuple[float, int | None, type[Exception]]]" = []  # noqa: RUF012
    # Where set, nobody writes before everybody has taken prompts: threads need not begin at the same time.
    all_busy: threading.Event | None = None

    def __init__(self, config, environment):
        self.seconds, self.dies_after, self.error = Toy.plans[len(Toy.made) % len(Toy.plans)]
        self.inbox: queue.Queue = queue.Queue()
        self.held: list[GenerationRequest] = []
        self.written: list[str] = []
        self.most_held = 0
        self.clock = 0.0
        self.closed = self.ended = False
        self.environment = environment
        Toy.made.append(self)

    def begin_sampling(self, requests, params, expected, *, more_follows=False):
        assert more_follows

    def add_requests(self, requests):
        self.held += requests
        self.most_held = max(self.most_held, len(self.held))
        if Toy.all_busy is not None and all(toy.most_held for toy in Toy.made):
            Toy.all_busy.set()

    def end_of_requests(self):
        assert not self.held
        self.ended = True

    def next_found(self):
        if self.ended:
            return None
        if Toy.all_busy is not None:
            assert Toy.all_busy.wait(patience(20))
        with Toy.turns:
            self.clock += self.seconds
            Toy.turns.notify_all()
            assert Toy.turns.wait_for(self.is_next, patience(20))
            if self.dies_after is not None and len(self.written) >= self.dies_after:
                self.clock = math.inf
                Toy.turns.notify_all()
                raise self.error("gone")
            return self._write()

    def is_next(self):
        return all(toy.clock >= self.clock for toy in Toy.made if toy.held)

    def _write(self):
        request = self.held.pop(0)
        self.written.append(request.request_id)
        Toy.turns.notify_all()
        return Response(request.request_id, (request.seed,), (-0.5,), "stop")

    def close(self):
        self.closed = True


@pytest.fixture
def backend(monkeypatch):
    def make(*plans, most=8, together=False):
        monkeypatch.setattr(replicas, "WorkerBackend", Toy)
        Toy.made, Toy.plans = [], list(plans)
        Toy.all_busy = threading.Event() if together else None
        return ReplicaBackend(VllmEngineConfig(replicas=len(plans), max_sequences=most))

    return make


def sample(backend, requests=REQUESTS):
    found, tokens = [], []
    done = threading.Event()

    def run():
        backend.sample(requests, SamplingParams(), None, found.append, tokens.append)
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience(20))
    assert done.is_set(), "the replicas wait for each other"
    return [response.request_id for response in found]


WELL = (0.001, None, WorkerDied)


def test_every_request_is_answered_once_and_everybody_works(backend):
    found = sample(backend(WELL, WELL, WELL, together=True))
    assert Counter(found) == Counter(request.request_id for request in REQUESTS)
    assert all(toy.written and toy.ended for toy in Toy.made)
    assert max(toy.most_held for toy in Toy.made) <= 8


def test_a_slow_replica_takes_fewer_prompts(backend):
    sample(backend((0.02, None, WorkerDied), WELL, together=True))
    slow, fast = (len(toy.written) for toy in Toy.made)
    assert slow < fast / 2


def test_nobody_takes_everything_at_once(backend):
    sample(backend(WELL, WELL, most=1000, together=True))
    assert all(len(toy.written) > len(REQUESTS) / 4 for toy in Toy.made)


def test_the_samples_of_a_prompt_stay_together(backend):
    sample(backend(WELL, WELL))
    owners = {}
    for number, toy in enumerate(Toy.made):
        for request in toy.written:
            owners.setdefault(request.split("/")[0], set()).add(number)
    assert all(len(who) == 1 for who in owners.values())


@pytest.mark.parametrize("after", [0, 1, 7, 20])
def test_what_a_dead_replica_did_not_finish_is_done_by_the_other_once(backend, after):
    one = backend((0.001, after, WorkerDied), (0.005, None, WorkerDied))
    found = sample(one)
    assert Counter(found) == Counter(request.request_id for request in REQUESTS)
    dead, alive = Toy.made
    assert dead.closed
    assert len(dead.written) == after
    assert not set(dead.written) & set(alive.written), "sampled twice"


def test_a_death_when_the_other_has_run_dry_wakes_it_again(backend):
    one = backend((0.2, 1, WorkerDied), WELL, most=4)
    found = sample(one, REQUESTS[: 2 * SAMPLES])
    assert len(found) == 2 * SAMPLES


def test_all_dead_is_an_error_and_so_is_a_failure(backend):
    for plans, error in (([(0.001, 3, WorkerDied)] * 2, WorkerDied), ([(0.001, 3, WorkerFailed), WELL], WorkerFailed)):
        one = backend(*plans)
        with pytest.raises(error):
            one.sample(REQUESTS, SamplingParams(), None, lambda r: None, lambda n: None)


def test_a_group_larger_than_the_room_still_runs():
    waiting = PromptQueue([GenerationRequest(str(i), (1,), i) for i in range(9)])
    assert waiting.take(4, idle=False) == []
    assert len(waiting.take(4, idle=True)) == 9
    assert waiting.take(4, idle=True) == []


def test_each_replica_sees_gpus_of_its_own():
    seen = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert [gpus_of_replica(i, 2, seen) for i in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]  # fmt: skip
    assert gpus_of_replica(1, 1, {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpus_of_replica(0, 1, {"CUDA_VISIBLE_DEVICES": ""}) == {}
