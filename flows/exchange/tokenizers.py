"""A party's tokenizer, which it publishes only where its config says so, and how another party gets it."""

from pathlib import Path

from rich.console import Console

from flows.exchange.status import mailbox_of
from flows.home import Home
from hacrl_core.artifacts.files import replace_synced
from hacrl_core.config.campaign import CampaignConfig
from hacrl_core.errors import ConfigError
from hacrl_core.exchange.messages import Refused
from hacrl_core.exchange.trial import TrialFailed, try_tokenizer
from stages.spec import StageCall

# The file tokenizer.json of an agent, as it travels beside its message.
VOCABULARY = "vocabulary.json"
# The largest vocabularies in use have some thirty megabytes.
_LARGEST = 64 << 20


def shares_tokenizer(config: CampaignConfig, call: StageCall) -> bool:
    """Whether a call makes the first version of an agent of this party whose tokenizer others may have."""
    if call.stage not in ("warmstart", "adopt") or not config.has_weights_of(call.agent):
        return False
    return "tokenizer" in config.parties[config.party_of(call.agent)].share


def fetch_tokenizer(console: Console, config: CampaignConfig, home: Home, agent: str, file: Path) -> None:
    """Write the tokenizer of another party's agent to a file, once its signature was checked."""
    if agent not in config.agents:
        raise ConfigError(f"--agent {agent}: the campaign's agents are {', '.join(config.agents)}")
    party = config.party_of(agent)
    if not party or "tokenizer" not in config.parties[party].share:
        raise ConfigError(f"--agent {agent}: parties.{party} has no share: [tokenizer]; its owner decides on that")
    mailbox = mailbox_of(config, home)
    try:
        message = mailbox.find("tokenizer", agent, config.agents[agent].joins)
    except Refused as refused:
        raise ConfigError(f"--agent {agent}: the tokenizer cannot be used: {refused}; ask {party} for it") from None
    if message is None:
        raise ConfigError(f"--agent {agent}: {party} has published no tokenizer yet; ask again when it has begun")
    size = max((table.bytes for table in message.tables), default=0)
    if size > _LARGEST:
        raise ConfigError(f"--agent {agent}: the tokenizer has {size} bytes, more than {_LARGEST}; do not use it")
    try:
        data = mailbox.fetch(message, VOCABULARY)
        # A child parses it; this process only carries the bytes.
        entries = try_tokenizer(data)
    except (Refused, TrialFailed) as problem:
        raise ConfigError(f"--agent {agent}: the tokenizer cannot be used: {problem}; ask {party} for it") from None
    replace_synced(file, data.decode())
    console.print(f"written: {file}, {entries} entries, signed by {party}", highlight=False, soft_wrap=True)
