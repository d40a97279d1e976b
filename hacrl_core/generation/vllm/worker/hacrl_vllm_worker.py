"""One vLLM engine behind a pair of pipes: a JSON object per line in, a JSON object per line out.

Commands: load, swap, sleep, prove, score, sample, and while sampling add and end. Replies: ``{"event": "done", …}``
ends a command, ``response`` and ``progress`` come before it, ``{"event": "failed", "error": …}`` means that the
engine's state is unknown and the process ends. Every response names the digest of the weights it was sampled from.
stdout and stderr are vLLM's and the libraries' to write to; they go to a log.
"""

import json
import os
import queue
import select
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
PROGRESS_SECONDS = 0.5
CPU_BLOCK = 128  # tokens in a block of the KV cache of vLLM's CPU build


def serve(commands: int, results: int) -> None:
    """Answer commands until the other end of the pipe is gone; then end, with every process vLLM has started."""
    inbox: queue.Queue[Message] = queue.Queue()
    threading.Thread(target=_read, args=(commands, inbox), daemon=True).start()
    worker = Worker(inbox)
    while True:
        command = inbox.get()
        try:
            for reply in worker.answer(command):
                _write(results, reply)
        except Exception as error:
            traceback.print_exc()
            _write(results, {"event": "failed", "error": f"{type(error).__name__}: {error}"})
            os._exit(1)


def _read(commands: int, inbox: "queue.Queue[Message]") -> None:
    parent = os.getppid()
    unfinished = b""
    while True:
        ready = select.select([commands], [], [], 1.0)[0]
        chunk = os.read(commands, 1 << 20) if ready else b""
        # A forked child of the engine's process may hold the pipe open after it has died, hence the parent's id as
        # well.
        if (ready and not chunk) or os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        *lines, unfinished = (unfinished + chunk).split(b"\n")
        for line in lines:
            inbox.put(json.loads(line))


def _write(results: int, reply: Message) -> None:
    view = memoryview(json.dumps(reply).encode() + b"\n")
    while view:
        view = view[os.write(results, view) :]


class Worker:
    """The engine and the digest of the weights it holds."""

    def __init__(self, inbox: "queue.Queue[Message]") -> None:
        """``inbox`` has what the other end sends while a command is carried out."""
        self.engine: Any = None
        self.digest: str | None = None  # of the weights in memory; None while they are being replaced
        self.asleep = False
        self._inbox = inbox

    def answer(self, command: Message) -> Iterator[Message]:
        """Carry out one command and yield its replies."""
        operation = command.pop("op")
        digest = command.pop("digest")
        if operation in ("prove", "score", "sample") and digest != self.digest:
            raise RuntimeError(f"asked for policy {digest}, but {self.digest} is loaded")
        if operation == "load":
            self.engine = start_engine(**command)
        elif operation == "swap":
            self._swap(command["checkpoint"])
        elif operation == "sleep":
            self._sleep()
            yield {"event": "done", "digest": digest}
            return
        elif operation == "prove":
            ranks = self.engine.collective_rpc("hacrl_differing_weights", args=(command["checkpoint"],))
            yield {"event": "done", "digest": digest, "differing": sorted({name for names in ranks for name in names})}
            return
        elif operation == "score":
            yield {"event": "done", "digest": digest, "logprobs": self._score(command["sequences"])}
            return
        else:
            yield from self._sample(**command)
        self.digest = digest
        yield {"event": "done", "digest": digest}

    def _sleep(self) -> None:
        """Give all device memory back. Level 2 keeps no weights: a swap has to follow."""
        self.digest = None
        self.engine.sleep(level=2)
        self.engine.collective_rpc("hacrl_forget_weights")
        self.asleep = True

    def _swap(self, checkpoint: str) -> None:
        self.digest = None
        if self.asleep:  # memory for the weights first, and for the cache when they are in
            self.engine.wake_up(["weights"])
        self.engine.collective_rpc("hacrl_swap_weights", args=(checkpoint,))
        if self.asleep:
            self.engine.wake_up(["kv_cache"])
            self.asleep = False
        # Cached keys and values belong to the old weights.
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied after a weight swap")

    def _score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of every token but the first, under the raw policy."""
        params = sampling_params(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        for index, token_ids in enumerate(sequences):
            self.engine.add_request(str(index), {"prompt_token_ids": token_ids}, params.clone())
        found: list[list[float]] = [[] for _ in sequences]
        for output in self._finished():
            token_ids = sequences[int(output.request_id)]
            rows = output.prompt_logprobs[1:]
            found[int(output.request_id)] = [row[t].logprob for t, row in zip(token_ids[1:], rows, strict=True)]
        return found

    def _sample(self, requests: list[Message], params: Message, more_follows: bool = False) -> Iterator[Message]:
        wanted = params | {"logprobs": 0, "detokenize": bool(params["stop"])}
        self._add(requests, wanted)
        written, reported = 0, time.monotonic()
        while more_follows or self.engine.has_unfinished_requests():
            more_follows = more_follows and self._take_more(wanted)
            for output in self._step():
                done = output.outputs[0]
                written += len(done.token_ids)
                logprobs = [row[t].logprob for t, row in zip(done.token_ids, done.logprobs, strict=True)]
                yield {
                    "event": "response",
                    "digest": self.digest,
                    "id": output.request_id,
                    "token_ids": list(done.token_ids),
                    "logprobs": logprobs,
                    "finish_reason": done.finish_reason,
                }
            if time.monotonic() - reported > PROGRESS_SECONDS:
                reported = time.monotonic()
                yield {"event": "progress", "tokens": written + self._in_flight()}

    def _add(self, requests: list[Message], params: Message) -> None:
        for request in requests:
            prompt = {"prompt_token_ids": request["prompt"]}
            self.engine.add_request(request["id"], prompt, sampling_params(**params, seed=request["seed"]))

    def _take_more(self, params: Message) -> bool:
        """Take requests that have arrived, waiting where there is nothing else to do; False: the last have come."""
        idle = not self.engine.has_unfinished_requests()
        while True:
            try:
                command = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if command["op"] == "end":
                return False
            self._add(command["requests"], params)
            idle = False

    def _step(self) -> Iterator[Any]:
        """One step of the engine; the outputs that it finished."""
        return (output for output in self.engine.step() if output.finished)

    def _finished(self) -> Iterator[Any]:
        """Outputs as they finish."""
        while self.engine.has_unfinished_requests():
            yield from self._step()

    def _in_flight(self) -> int:
        try:
            states = self.engine.output_processor.request_states.values()
            return sum(state.detokenizer.num_output_tokens() for state in states)
        except AttributeError:  # inner parts of vLLM, read for the progress bar only
            return 0


def sampling_params(**settings: Any) -> Any:
    """Return vLLM's own parameters object; only finished responses are reported."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # type: ignore[import-not-found]

    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **settings)


def start_engine(
    checkpoint: str, max_length: int, memory_share: float, max_sequences: int, can_sleep: bool = False, **settings: Any
) -> Any:
    """Start a vLLM engine on a checkpoint."""
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]
    from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found]

    args = EngineArgs(
        model=checkpoint,
        max_model_len=max_length + 1,  # scoring a response of full length asks vLLM for one token more
        max_num_seqs=max_sequences,
        gpu_memory_utilization=memory_share,
        # The log-probs of the distribution sampled from. Seeds per request rule out the kernels that cannot give them.
        logprobs_mode="processed_logprobs",
        worker_extension_cls="hacrl_vllm_extension.WeightSwap",
        trust_remote_code=False,
        disable_log_stats=True,
        enable_sleep_mode=can_sleep and not current_platform.is_cpu(),  # the CPU build pauses, but keeps its memory
        **settings,
    )
    if args.tensor_parallel_size == 1:
        _inspect_in_process()
    if current_platform.is_cpu():
        # A seeded request whose prompt is split over two steps ends vLLM's CPU build: its random generator has no
        # offset.
        args.enable_chunked_prefill = False
        args.max_num_batched_tokens = max(max_length + 1, 4096)
        args.kv_cache_memory_bytes = _cpu_cache_bytes(args, memory_share)
    return LLMEngine.from_engine_args(args)


def _inspect_in_process() -> None:
    """Let vLLM look at the model class here instead of in a fresh interpreter, which would import vLLM all over again.

    It does that once per architecture, to keep CUDA out of a process that may fork; this one does not, and loads the
    class anyway.
    """
    from vllm.model_executor.models import registry  # type: ignore[import-not-found]

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda inspect: inspect()


def _cpu_cache_bytes(args: Any, memory_share: float) -> int:
    """What the sequences in flight can fill, and no more than the share of the memory that is free now.

    Left alone, vLLM takes the share of all memory for itself, so the second agent on a machine would find none.
    """
    import psutil

    config = args.create_engine_config()
    model = config.model_config
    size = {"torch.float32": 4}.get(str(model.dtype), 2)
    layers, heads = model.get_num_layers(config.parallel_config), model.get_num_kv_heads(config.parallel_config)
    per_block = CPU_BLOCK * 2 * layers * heads * model.get_head_size() * size
    blocks = args.max_num_seqs * -(-args.max_model_len // CPU_BLOCK) + 8
    return int(min(blocks * per_block, memory_share * psutil.virtual_memory().available))
