"""Limits of time that follow the machine: what takes a second on a quiet core may take ten on a busy one.

Limits only end a wait that would never end by itself. What a test means is asserted in other ways, for example by
counting connections.
"""

import os
import time

# CPU seconds that the loop below takes on the core that the limits in the tests were chosen for.
_REFERENCE_SECONDS = 0.03
# The load is a mean of the last minute: a machine that has just become busy still looks quiet.
_AT_LEAST = 4.0


def factor() -> float:
    """Return how many times longer work takes here and now than on a quiet core of the reference machine."""
    begun = time.process_time()
    sum(i * i for i in range(400_000))
    slower = (time.process_time() - begun) / _REFERENCE_SECONDS
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(1.0, slower) * max(1.0, 2 * busy)


def patience(seconds: float) -> float:
    """Return the limit for what takes at most ``seconds`` on a quiet core, however busy the machine becomes.

    Only a test that fails waits so long. A limit that a good test waits for is ``seconds * factor()``.
    """
    return seconds * max(_AT_LEAST, factor())
