"""``hacrl doctor --config``: check every agent of a campaign before anything runs, without reading weights."""

from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flows.doctor.faults import first_problem, place_of, shared_faults, software_faults
from flows.plan.plan import memory_of, share_faults
from flows.plan.rates import engine_gpus
from flows.views.text import gib
from hacrl_core.agents.adoption import read_origin
from hacrl_core.agents.warmstart import corpus_and_tokenizer, make_model
from hacrl_core.config.agents import AgentConfig
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.errors import HacrlError
from hacrl_core.learning.memory import Estimate, host_bytes
from hacrl_core.learning.shape import Shape, shape_of
from hacrl_core.printable import printable
from hacrl_core.problems import Problem, load_problems
from hacrl_core.problems.arithmetic import SOURCE, worked_answer
from hacrl_core.rendering import decode_response, encode_response, render_prompt, tokenizer_fingerprint
from hacrl_core.seeding import derive_seed

# Asked where the campaign's own problems cannot be read.
PLACEHOLDER = Problem("placeholder", ({"role": "user", "content": "What is 17+25?"},), "42", "doctor", {})


@dataclass
class Checkup:
    """What the checks found about one agent."""

    agent: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    prompt: str = ""
    prompt_tokens: int = 0
    memory: Estimate | None = None
    # Bytes in the host's memory that update.offload keeps there.
    offloaded: int = 0
    # The device on which it scores and learns, the first of them where there are several.
    place: str = "cpu"
    devices: tuple[str, ...] = ()
    fingerprint: str = ""
    faults: list[str] = field(default_factory=list)


def check_campaign(console: Console, config: CampaignConfig) -> int:
    """Print what was found; return 2 and print one line per fault if the campaign would fail."""
    faults: list[str] = []
    problem = _problem(config, faults)
    if problem is not PLACEHOLDER:
        _show_problems(console, config, problem)
    faults += shared_faults(config)
    checkups = [_check(config, agent, problem) for agent in config.agents]
    for checkup in checkups:
        _show(console, checkup, [c.agent for c in checkups if c is not checkup and _shares_tokens(c, checkup)])
    faults += [f"agent {checkup.agent}: {fault}" for checkup in checkups for fault in checkup.faults]
    faults += _show_memory(console, config, checkups)
    for fault in faults:
        console.print(Text.assemble(("fault: ", "red"), fault), soft_wrap=True)
    if not faults:
        console.print(f"{config.name}: {len(checkups)} agents are ready.")
    return 2 if faults else 0


def _problem(config: CampaignConfig, faults: list[str]) -> Problem:
    """Return the campaign's first problem, or a placeholder if it cannot be read, so that agents are still checked."""
    try:
        return first_problem(config)
    except HacrlError as fault:
        faults.append(str(fault))
        return PLACEHOLDER


def _check(config: CampaignConfig, agent: str, problem: Problem) -> Checkup:
    checkup, settings = Checkup(agent), config.agents[agent]
    checkup.place, device_fault = place_of(settings)
    checkup.faults += [*filter(None, [device_fault]), *software_faults(config, agent)]
    try:
        tokenizer, stops, shape = _load(config, agent, checkup)
        _check_tokens(config, checkup, tokenizer, stops, problem, shape.context)
    except HacrlError as fault:
        checkup.faults.append(str(fault))
        return checkup
    if device_fault:
        return checkup  # whether it would fit is a question to `hacrl plan`
    generate = config.generation(agent)
    longest = generate.max_prompt_tokens or checkup.prompt_tokens
    checkup.devices = _devices(config, agent, checkup.place)
    total = min(map(total_bytes, checkup.devices))
    checkup.memory = memory_of(config, shape, agent, longest, total)
    checkup.offloaded = host_bytes(shape, config.training(agent))
    checkup.faults += share_faults(config, shape, agent, total)
    return checkup


def _devices(config: CampaignConfig, agent: str, place: str) -> tuple[str, ...]:
    """Return the devices that an agent fills: its GPUs as far as its ranks and its engine reach, else its place."""
    gpus = config.agents[agent].gpus
    if not place.startswith("cuda") or not gpus:
        return (place,)
    reach = max(config.training(agent).ranks, engine_gpus(config.generation(agent)))
    return tuple(f"cuda:{gpu}" for gpu in gpus[:reach])


def _load(config: CampaignConfig, agent: str, checkup: Checkup) -> tuple[Any, tuple[int, ...], Shape]:
    """Return tokenizer, end tokens and shape; add to the facts where the agent comes from."""
    settings = config.agents[agent]
    if settings.warmstart is not None:
        tokenizer, model_config = _untrained(config, agent)
        shape = shape_of(model_config)
        stops: tuple[int, ...] = (int(tokenizer.eos_token_id),)
        checkup.facts.append(("from", "a warm start"))
    else:
        assert settings.checkpoint is not None
        origin = read_origin(settings.checkpoint, settings.chat_template)
        tokenizer, stops = origin.tokenizer, origin.stop_token_ids
        model_config = origin.config
        shape = shape_of(model_config, trust_remote_code=settings.checkpoint.trust_remote_code)
        checkup.facts.append(("from", _source(settings, origin.commit)))
    kind = getattr(model_config, "model_type", "?")
    size = f"{shape.parameters / 1e6:,.1f}M" if shape.parameters >= 1e5 else f"{shape.parameters:,}"
    checkup.facts.append(("model", f"{kind}, {size} parameters, context {shape.context:,}"))
    return tokenizer, stops, shape


def _untrained(config: CampaignConfig, agent: str) -> tuple[Any, Any]:
    """Return the tokenizer and the model config of an agent that starts from a warm start."""
    warmstart, corpus = config.agents[agent].warmstart, config.corpus
    # The config guarantees both.
    assert warmstart is not None
    assert corpus is not None
    _, tokenizer = corpus_and_tokenizer(warmstart, corpus, derive_seed(config.seed, "warmstart", agent))
    return tokenizer, make_model(warmstart.model, tokenizer, 0).config


def _source(settings: AgentConfig, commit: str | None) -> str:
    checkpoint = settings.checkpoint
    assert checkpoint is not None
    parts = [checkpoint.path, checkpoint.gguf_file or ""]
    if commit:
        asked = checkpoint.revision or "main"
        parts.append(f"commit {commit}" if asked == commit else f"{asked} = commit {commit}; pin it as revision")
    if checkpoint.trust_remote_code:
        parts.append("runs its own code")
    return ", ".join(filter(None, parts))


def _check_tokens(
    config: CampaignConfig, checkup: Checkup, tokenizer: Any, stops: tuple[int, ...], problem: Problem, context: int
) -> None:
    """Render a prompt, encode a foreign response, and compare lengths with the limits."""
    agent, limit = config.agents[checkup.agent], config.generation(checkup.agent)
    prompt = render_prompt(
        tokenizer, problem.messages, agent.template_override, template_options=agent.template_options
    )
    checkup.prompt, checkup.prompt_tokens = tokenizer.decode(prompt), len(prompt)
    settled = config.boundary(checkup.agent, tuple(config.agents)) == "settled"
    checkup.fingerprint = tokenizer_fingerprint(tokenizer, "" if settled else agent.template_override)
    names = tokenizer.convert_ids_to_tokens(list(stops))
    has_bos = tokenizer.bos_token_id is not None and prompt[0] == tokenizer.bos_token_id
    checkup.facts.append(
        ("tokens", f"{len(tokenizer):,}; end tokens {' '.join(names)}; {'BOS first' if has_bos else 'no BOS'}")
    )
    foreign = worked_answer(problem) if problem.source == SOURCE else f"So the answer is \\boxed{{{problem.answer}}}."
    read = encode_response(tokenizer, foreign, finished=True, stop_token_id=stops[0], max_tokens=limit.max_tokens)
    back = decode_response(tokenizer, read.token_ids)
    checkup.facts.append(("foreign", f"{foreign} = {len(read.token_ids)} tokens, the last {names[0]}"))
    checkup.facts.append(("ends", _both_ends(config, checkup.agent, checkup.prompt, names)))
    if back.strip() != foreign and not read.truncated:
        checkup.faults.append(
            f"another agent's response {foreign!r} reads back as {back!r}; its tokenizer cannot spell it"
        )
    if limit.max_prompt_tokens is not None and len(prompt) > limit.max_prompt_tokens:
        checkup.faults.append(
            f"a prompt has {len(prompt)} tokens, generate.max_prompt_tokens is {limit.max_prompt_tokens}; raise it"
        )
    longest = max(limit.max_prompt_tokens or 0, len(prompt)) + limit.max_tokens
    if longest > context:
        checkup.faults.append(
            f"prompt and response take up to {longest} tokens, its context has {context}; lower generate.max_tokens"
        )


def _both_ends(config: CampaignConfig, agent: str, prompt: str, end_tokens: list[str]) -> str:
    """Say where the agent's responses begin and end, and what becomes of other agents' responses there."""
    strings = config.generation(agent).stop_strings
    ends = [f"the stop string {text!r}" for text in strings] + [f"the end token {name}" for name in end_tokens]
    settled = config.boundary(agent, tuple(config.agents)) == "settled"
    foreign = "get its own lead and end" if settled else f"keep their white space and end with {end_tokens[0]}"
    last = prompt[-12:]
    return f"a response begins after {last!r} and ends with {' or '.join(ends)}; other agents' responses {foreign}"


# -- output -----------------------------------------------------------------------------------------------------------


def _show_problems(console: Console, config: CampaignConfig, example: Problem) -> None:
    """Print how many problems there are, how many rows were left out and why, and one of them with its gold."""
    found = load_problems(config.problems, config.withheld)
    count = "new ones in every iteration" if found.generator is not None else f"{len(found.problems):,}"
    out = ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in found.left_out.items())
    asked = " ".join(str(example.messages[-1]["content"]).split())
    console.print(Text(f"problems: {count}" + (f"; rows left out: {out}" if out else "")), soft_wrap=True)
    shown = asked if len(asked) <= 100 else asked[:99] + "…"
    console.print(Text(f"  e.g. {printable(shown)!r}, gold {printable(example.answer)[:60]!r}\n"), soft_wrap=True)


def _show(console: Console, checkup: Checkup, same_tokens: list[str]) -> None:
    console.print(Text(checkup.agent, style="bold"))
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for what, fact in checkup.facts:
        table.add_row(what, Text(fact))
    if same_tokens:
        table.add_row("shares", f"tokens with {', '.join(same_tokens)}: ids are kept")
    if checkup.prompt:
        table.add_row("prompt", Text(f"{checkup.prompt_tokens} tokens:", style="dim"))
        table.add_row("", Text(checkup.prompt.rstrip("\n"), style="cyan"))
    console.print(Padding(table, (0, 0, 1, 1)))


def _shares_tokens(one: Checkup, other: Checkup) -> bool:
    return bool(one.fingerprint) and one.fingerprint == other.fingerprint


def _show_memory(console: Console, config: CampaignConfig, checkups: list[Checkup]) -> list[str]:
    """Print the memory of every agent. Workers on the CPU run side by side, so it adds up; on a GPU they take turns."""
    places: dict[str, list[tuple[str, Estimate]]] = {}
    for checkup in checkups:
        if checkup.memory is not None:
            places.setdefault(checkup.place, []).append((checkup.agent, checkup.memory))
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("memory, GiB")
    for title in ("device", "generate", "score", "update", "free"):
        table.add_column(title, justify="right")
    table.add_column("")
    faults = []
    for place, there in places.items():
        fullest, free = _fullest({device for c in checkups if c.place == place for device in c.devices})
        highest = [memory.highest for _, memory in there]
        need = sum(highest) if place == "cpu" else max(highest)
        fits = free is None or need <= free
        verdict = "fits" if fits else "does not fit"
        for agent, memory in there:
            stages = [gib(size) for size in (memory.generate, memory.score, memory.update)]
            table.add_row(agent, place, *stages, *(["", "?"] if free is None else [gib(free), verdict]))
        if not fits:
            names = " and ".join(agent for agent, _ in there)
            faults.append(
                f"{fullest}: {names} need about {gib(need)} GiB, {gib(free or 0)} are free; "
                "spread it over more GPUs (update.ranks), lower update.token_budget, generate.batch_size or "
                "engine.memory_share, set update.gradient_checkpointing, or train adapters (update.lora)"
            )
    offloaded = {c.agent: c.offloaded for c in checkups if c.offloaded and c.place != "cpu"}
    free_here = free_bytes("cpu") or 0
    if sum(offloaded.values()) > free_here:
        faults.append(
            f"host: update.offload of {' and '.join(offloaded)} keeps about {gib(sum(offloaded.values()))} GiB in the "
            f"host's memory, {gib(free_here)} are free; set offload: none with more ranks, or use another machine"
        )
    if places:
        console.print(table)
        console.print()
    return faults


def _fullest(devices: set[str]) -> tuple[str, int | None]:
    """Return the device with the least free memory, and how much that is; None if it is unknown."""
    free = {device: free_bytes(device) for device in sorted(devices)}
    return min(free.items(), key=lambda found: -1 if found[1] is None else found[1])


def total_bytes(place: str) -> int:
    """Return the memory of a GPU; 0 for any other device."""
    return int(torch.cuda.mem_get_info(place)[1]) if place.startswith("cuda") else 0


def free_bytes(place: str) -> int | None:
    """Return the free memory of a device; None if it is unknown."""
    if place.startswith("cuda"):
        return int(torch.cuda.mem_get_info(place)[0])
    return int(psutil.virtual_memory().available) if place == "cpu" else None
