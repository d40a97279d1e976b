"""What would end a campaign: the checks that ``hacrl doctor --config`` and ``hacrl run`` share.

They read neither weights nor tokenizers, and import torch only for an agent that asks for a GPU or for vLLM.
"""

import errno
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator

from flows.home import Home
from hacrl_core.artifacts.sources import locate
from hacrl_core.config.agents import AgentConfig
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.config.generation import VllmEngineConfig
from hacrl_core.errors import HacrlError
from hacrl_core.problems import Problem, load_problems
from hacrl_core.seeding import derive_seed
from hacrl_core.verification import check_verifier
from hacrl_core.verification.verifiers import resolve_verifier


def campaign_faults(config: CampaignConfig, adopted: Collection[str] = ()) -> list[str]:
    """Return what would end the campaign, a line for each; ``adopted`` agents are in the store already."""
    faults = [*shared_faults(config)]
    try:
        first_problem(config)
    except HacrlError as fault:
        faults.insert(0, str(fault))
    for agent in filter(config.has_weights_of, config.agents):
        own = [place_of(config.agents[agent])[1], *software_faults(config, agent)]
        own += hub_faults(config.agents[agent]) if agent not in adopted else ()
        faults += [f"agent {agent}: {fault}" for fault in own if fault]
    return faults


def home_faults(home: Home) -> Iterator[str]:
    """Yield the folders of the store that may not be written: the stages' processes would find out one by one."""
    for folder in (home.store, *home.store.glob("*/"), *home.store.glob("objects/*/")):
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            reason = os.strerror(errno.EACCES)
            yield f"home {home.root}: {folder}: {reason}; give a folder that you may write to with --home or HACRL_HOME"
            return


def first_problem(config: CampaignConfig) -> Problem:
    """Return the campaign's first problem; raise HacrlError where there are not enough or they cannot be read."""
    seed = derive_seed(config.seed, "sample")
    return load_problems(config.problems, config.withheld).for_iteration(seed, 0, config.prompts_per_iteration)[0]


def shared_faults(config: CampaignConfig) -> Iterator[str]:
    """Yield what is wrong with the benchmarks and with the user's own verifier."""
    for benchmark in config.evaluate.benchmarks:
        try:
            load_problems(benchmark.problems)
        except HacrlError as fault:
            yield f"benchmark {benchmark.name}: {fault}"
    try:
        check_verifier(resolve_verifier(config.verify, config.problems))
    except HacrlError as fault:
        yield str(fault)


def place_of(settings: AgentConfig) -> tuple[str, str | None]:
    """Return the device on which an agent scores and learns, and a fault where this machine does not have it."""
    if not settings.gpus and settings.device != "auto" and not settings.device.startswith("cuda"):
        return settings.device, None
    if not settings.gpus and settings.device == "auto" and not _has_torch():
        return "cpu", None  # not looked at: whatever there is will do
    import torch

    count = torch.cuda.device_count()
    missing = [str(gpu) for gpu in settings.gpus if gpu >= count]
    if missing:
        what = f"GPU {missing[0]} does" if len(missing) == 1 else f"GPUs {', '.join(missing)} do"
        return "cpu", f"{what} not exist, this machine has {count}; correct gpus"
    seen = settings.gpus or tuple(range(count))
    wanted = settings.device
    if wanted == "auto":
        wanted = "cuda" if seen else "cpu"
    if not wanted.startswith("cuda"):
        return wanted, None
    index = int(wanted.partition(":")[2] or 0)
    if index < len(seen):
        return f"cuda:{seen[index]}", None
    return "cpu", f"device {wanted} does not exist: the agent sees {len(seen)} GPUs; set device or gpus"


def software_faults(config: CampaignConfig, agent: str) -> Iterator[str]:
    """Yield what an agent's settings need and this machine lacks."""
    engine, attention = config.generation(agent).engine, config.agents[agent].attention
    if isinstance(engine, VllmEngineConfig) and engine.url is None:
        from hacrl_core.generation.vllm.process import find_python

        try:
            find_python(engine.python)
        except HacrlError as fault:
            yield str(fault)
    if config.training(agent).lora is not None and importlib.util.find_spec("peft") is None:
        yield "update.lora is set but peft is not installed; install the extra hacrl[lora]"
    if attention.startswith("flash") and importlib.util.find_spec("flash_attn") is None:
        yield f"attention {attention} is set but flash-attn is not installed; set attention to auto"
    checkpoint = config.agents[agent].checkpoint
    if checkpoint is not None and checkpoint.gguf_file and importlib.util.find_spec("gguf") is None:
        yield "gguf_file is set but gguf is not installed; install the extra hacrl[real]"


def hub_faults(settings: AgentConfig) -> Iterator[str]:
    """Yield why a checkpoint cannot be read: no folder, or a hub id that neither the hub nor its cache has."""
    if settings.checkpoint is None:
        return
    try:
        if isinstance(locate(settings.checkpoint), str):
            from hacrl_core.agents.adoption import read_origin

            read_origin(settings.checkpoint, settings.chat_template)
    except HacrlError as fault:
        yield str(fault)


def _has_torch() -> bool:
    """Whether torch is imported: to import it takes seconds."""
    return "torch" in sys.modules
