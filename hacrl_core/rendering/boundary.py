"""Where a response begins and ends: each agent has its own convention, and a text that travels takes none with it.

A model whose prompt ends in ``Answer:`` begins with a space, a chat model does not; one ends with an end token, another
with a stop string. Such a token is as good as impossible to an agent of another convention, and one impossible token
moves the mean log-prob of a short response out of any window. So the text travels bare, and the learner gets its own
beginning and end (decision 0076).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hacrl_core.rendering.plain_text import encode_plain_text
from hacrl_core.rendering.responses import EncodedResponse, decode_response


@dataclass(frozen=True)
class Written:
    """One response as its sampler wrote it."""

    text: str
    token_ids: Sequence[int]
    finished: bool  # the sampler ended it; its length limit did not


@dataclass(frozen=True)
class Boundary:
    """How an agent begins and ends its responses."""

    lead: str  # white space before the text
    tail: str  # what follows the text: white space, a stop string
    end_token: int | None  # None: it ends with its tail, a stop string


def boundary_of(
    tokenizer: Any, responses: Sequence[Written], stop_token_ids: Sequence[int], stop_strings: Sequence[str] = ()
) -> Boundary:
    """Return the convention that most of an agent's own responses follow.

    Where none of them is finished, the agent's settings decide: its first stop string, else its first end token.
    """
    leads = Counter(r.text[: len(r.text) - len(r.text.lstrip())] for r in responses if r.text.strip())
    ends = Counter(_end_of(tokenizer, r, stop_token_ids) for r in responses if r.finished and r.token_ids)
    lead = leads.most_common(1)[0][0] if leads else ""
    if ends:
        return Boundary(lead, *ends.most_common(1)[0][0])
    return Boundary(lead, stop_strings[0], None) if stop_strings else Boundary(lead, "", stop_token_ids[0])


def _end_of(tokenizer: Any, response: Written, stop_token_ids: Sequence[int]) -> tuple[str, int | None]:
    ids = list(response.token_ids)
    end_token = ids[-1] if ids[-1] in stop_token_ids else None
    written = decode_response(tokenizer, ids if end_token is None else ids[:-1])
    return written[len(response.text.rstrip()) :], end_token


def settle_response(
    tokenizer: Any, response: Written, boundary: Boundary, stop_token_ids: Sequence[int], max_tokens: int
) -> EncodedResponse:
    """Encode another agent's response in the learner's tokens, with the learner's own beginning and end.

    A response that was cut off gets no end. There are at most ``max_tokens`` tokens; nothing in the text becomes a
    special token.
    """
    bare = response.text.strip() if response.finished else response.text.lstrip()
    text = (boundary.lead + bare if bare else "") + (boundary.tail if response.finished else "")
    ids = encode_plain_text(tokenizer, text, never=frozenset(stop_token_ids[:1]))
    if response.finished and boundary.end_token is not None:
        ids.append(boundary.end_token)
    return EncodedResponse(tuple(ids[:max_tokens]), truncated=len(ids) > max_tokens)


def settle_ids(response: Written, theirs: Boundary, ours: Boundary) -> tuple[int, ...] | None:
    """Return the ids of a response in one tokenizer with the learner's end token; None where more than that differs."""
    ids = tuple(response.token_ids)
    if (theirs.lead, theirs.tail, theirs.end_token is None) != (ours.lead, ours.tail, ours.end_token is None):
        return None
    if response.finished and ours.end_token is not None and ids[-1:] == (theirs.end_token,):
        return (*ids[:-1], ours.end_token)
    return ids
