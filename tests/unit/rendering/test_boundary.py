"""Responses travel without their writer's beginning and end: one test per pair of conventions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hacrl_core.generation.stop_strings import StopStrings
from hacrl_core.rendering import Boundary, Written, boundary_of, settle_ids, settle_response


@dataclass(frozen=True)
class Agent:
    """A convention with a tokenizer: what its responses look like, and how it ends them."""

    tokenizer: Any
    lead: str
    end: str
    stop_strings: tuple[str, ...]

    @property
    def stops(self) -> tuple[int, ...]:
        return (int(self.tokenizer.eos_token_id),)

    def writes(self, text: str, *, finished: bool = True) -> Written:
        """A response as the agent would write it: its tokens, and the text that others read."""
        ids = self.tokenizer.encode(self.lead + text + (self.end if finished else ""), add_special_tokens=False)
        if finished and not self.stop_strings:
            ids = [*ids, *self.stops]
        return Written(StopStrings(self.tokenizer, self.stop_strings).text(ids), ids, finished)

    @property
    def boundary(self) -> Boundary:
        # One odd response does not change the convention.
        own = [self.writes("1+1=2"), self.writes("2+2=4"), self.writes("3+3", finished=False)]
        odd = Written("  7", [*self.tokenizer.encode("  7 ", add_special_tokens=False), *self.stops], True)
        return boundary_of(self.tokenizer, [*own, odd], self.stops, self.stop_strings)


@pytest.fixture
def conventions(make: Callable[[str], Any]) -> dict[str, tuple[Agent, Agent]]:
    """Each convention in two tokenizers."""
    made = {
        "chat": ("", "", ()),
        "base with a stop string": (" ", "\n\n", ("\n",)),
        "base with an end token": (" ", "", ()),
    }
    one, other = make("byte_bpe"), make("byte_bpe_whole_words")
    return {name: (Agent(one, *how), Agent(other, *how)) for name, how in made.items()}


NAMES = ("chat", "base with a stop string", "base with an end token")


@pytest.mark.parametrize("writer", NAMES)
@pytest.mark.parametrize("learner", NAMES)
def test_a_foreign_response_has_the_tokens_that_the_learner_would_have_written(conventions, writer, learner):
    theirs, ours = conventions[writer][0], conventions[learner][1]
    text = "12+30=42, so it is 42"
    for finished in (True, False):
        read = settle_response(ours.tokenizer, theirs.writes(text, finished=finished), ours.boundary, ours.stops, 99)
        assert list(read.token_ids) == list(ours.writes(text, finished=finished).token_ids)
        assert not read.truncated


@pytest.mark.parametrize(("name", "expected"), [*zip(NAMES, [("", ""), (" ", "\n\n"), (" ", "")], strict=True)])
def test_the_convention_is_that_of_most_own_responses(conventions, name, expected):
    agent = conventions[name][1]
    end_token = None if agent.stop_strings else agent.stops[0]
    assert agent.boundary == Boundary(*expected, end_token)


def test_without_a_finished_response_the_settings_decide(conventions):
    base, chat = conventions["base with a stop string"][1], conventions["chat"][1]
    cut = [base.writes("1+1", finished=False)]
    assert boundary_of(base.tokenizer, cut, base.stops, base.stop_strings) == Boundary(" ", "\n", None)
    assert boundary_of(chat.tokenizer, [], chat.stops) == Boundary("", "", chat.stops[0])


def test_a_response_that_is_too_long_is_cut_and_one_without_text_keeps_its_end(conventions):
    ours = conventions["base with a stop string"][1]
    empty, long = Written("", ours.stops, True), Written("x" * 50, [1], True)
    assert (
        ours.tokenizer.decode(settle_response(ours.tokenizer, empty, ours.boundary, ours.stops, 9).token_ids) == "\n\n"
    )
    read = settle_response(ours.tokenizer, long, ours.boundary, ours.stops, 9)
    assert len(read.token_ids) == 9
    assert read.truncated


def test_with_one_tokenizer_ids_stay_and_only_another_end_token_is_exchanged():
    theirs, ours = Boundary("", "", 2), Boundary("", "", 3)
    assert settle_ids(Written("a", (7, 8, 2), True), theirs, ours) == (7, 8, 3)
    assert settle_ids(Written("a", (7, 8), False), theirs, ours) == (7, 8)
    assert settle_ids(Written("a", (7, 8, 2), True), theirs, theirs) == (7, 8, 2)
    assert settle_ids(Written("a", (7, 8, 2), True), theirs, Boundary(" ", "", 2)) is None
    assert settle_ids(Written("a", (7, 8, 2), True), theirs, Boundary("", "\n", None)) is None
