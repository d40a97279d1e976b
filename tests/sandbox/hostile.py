"""All hostile programs, by family."""

from tests.sandbox.cases import Hostile, Place
from tests.sandbox.escapes import network, processes, reads, signals, system_calls, writes
from tests.sandbox.fakes import fake_checks, fakes
from tests.sandbox.hogs import hogs


def all_programs(place: Place) -> list[Hostile]:
    """Return every hostile program, names unique."""
    families = (reads, writes, network, processes, signals, system_calls, hogs, fakes, fake_checks)
    return [each for family in families for each in family(place)]
