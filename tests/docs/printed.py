"""Compares what a command printed with what a page says it prints.

Words must be the same. Numbers, signs, units of size and white space may differ, because they depend on the machine.
A line ``...`` in the page stands for any lines, and ``...`` inside a line for any text.
"""

import re

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER = re.compile(r"[+\-−]?\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?")
_SIZE = re.compile(r"# ?(?:B|kB|MB|GB|TB|MiB|GiB)\b")
_BARS = re.compile(r"[▁▂▃▄▅▆▇█]+")
ELLIPSIS = "..."


def clean_text(text: str, places: dict[str, str]) -> str:
    """Return an output without colours and without this machine's folders."""
    text = _ANSI.sub("", text)
    for place, name in places.items():
        text = text.replace(place, name)
    return text


def clean_lines(text: str) -> list[str]:
    """Return the lines of an output as a page shows them: without empty lines at the ends, and one at most between."""
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    kept = [line for place, line in enumerate(lines) if line or (place and lines[place - 1])]
    while kept and not kept[-1]:
        kept.pop()
    return kept


def normal(line: str) -> str:
    """Return a line without what may differ between machines."""
    line = _SIZE.sub("#B", _NUMBER.sub("#", _BARS.sub("▄", line)))
    return re.sub(r"\s+", " ", line).strip()


def _same(expected: str, actual: str) -> bool:
    pattern = ".*".join(re.escape(normal(part)) for part in expected.split(ELLIPSIS))
    return re.fullmatch(pattern.replace(r"\ ", " ?"), normal(actual)) is not None


def match_lines(expected: list[str], actual: list[str]) -> list[int | None] | None:
    """Return for each expected line the index of the line that it matches, or None: no match.

    It is None for ``...`` and for empty lines, which do not count on either side.
    """
    places = [at for at, line in enumerate(actual) if line]
    matched = _match([line for line in expected if line], [actual[at] for at in places])
    if matched is None:
        return None
    rest = iter(matched)
    found = [next(rest) if line else None for line in expected]
    return [None if at is None else places[at] for at in found]


def _match(expected: list[str], actual: list[str]) -> list[int | None] | None:
    # reach[i] = the places in actual from which expected[i:] can be matched to the end.
    reach: list[set[int]] = [set() for _ in expected] + [{len(actual)}]
    for i in range(len(expected) - 1, -1, -1):
        if expected[i].strip() == ELLIPSIS:
            reach[i] = set(range(max(reach[i + 1], default=-1) + 1))
        else:
            reach[i] = {j - 1 for j in reach[i + 1] if j and _same(expected[i], actual[j - 1])}
    if 0 not in reach[0]:
        return None
    found: list[int | None] = []
    at = 0
    for i, line in enumerate(expected):
        if line.strip() == ELLIPSIS:
            found.append(None)
            at = _nearest(expected[i + 1 : i + 2], actual, sorted(j for j in reach[i + 1] if j >= at))
        else:
            found.append(at)
            at += 1
    return found


def _nearest(after: list[str], actual: list[str], places: list[int]) -> int:
    """Return the first place, if possible one with the page's own numbers: ``iteration 6/6`` stays the last."""
    exact = [at for at in places for line in after if actual[at:] and actual[at].startswith(line.split(ELLIPSIS)[0])]
    return (exact or places)[0]


def renew_lines(expected: list[str], actual: list[str]) -> list[str]:
    """Return the page's lines with the numbers of this run; all printed lines where the words are others."""
    matched = match_lines(expected, actual)
    if matched is None:
        return actual
    return [line if at is None else _renewed(line, actual[at]) for line, at in zip(expected, matched, strict=True)]


def _renewed(expected: str, actual: str) -> str:
    """Return the printed line; where the page leaves out its end, only what comes before."""
    before, gap, behind = expected.partition(ELLIPSIS)
    if not gap:
        return actual
    shown = [end for end in range(len(actual) + 1) if normal(actual[:end]) == normal(before)]
    return f"{actual[: shown[-1]]}{ELLIPSIS}" if shown and not behind else expected
