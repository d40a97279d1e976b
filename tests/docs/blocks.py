"""The fenced code blocks of Markdown pages: what they hold, and what their pages say about them.

A comment in the line above a block says how it is checked::

    <!-- not run: it needs eight GPUs -->
    <!-- example: which answers there are depends on the machine -->
    <!-- yaml: benchmark -->
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```[ ]*$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!-- *([a-z ]+): *((?:(?!-->).)*?) *-->\s*$", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its file name where it has one, its text, and its place in the page."""

    page: Path
    language: str
    title: str
    body: str
    start: int
    end: int
    # What the comment above it says: "not run" or "example" → the reason, "yaml" → what the settings belong to.
    says: dict[str, str]

    @property
    def where(self) -> str:
        """The page and the line of the block's fence."""
        line = self.page.read_text()[: self.start].count("\n") + 1
        return f"{self.page.relative_to(ROOT)}:{line}"


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text, found = page.read_text(), []
    for match in _FENCE.finditer(text):
        indent, info, body = match.groups()
        language, _, options = info.strip().partition(" ")
        title = re.search(r'title="([^"]+)"', options)
        comment = _COMMENT.search(text[: match.start()])
        lines = [line.removeprefix(indent) for line in body.splitlines()]
        found.append(
            Block(
                page=page,
                language=language,
                title=title.group(1) if title else "",
                body="\n".join(lines) + "\n",
                start=match.start(),
                end=match.end(),
                says={comment.group(1): comment.group(2)} if comment else {},
            )
        )
    return found


def all_pages() -> list[Path]:
    """Return every Markdown page of the project that a user may read."""
    folders = [ROOT.glob("*.md"), ROOT.glob("docs/**/*.md"), ROOT.glob("infra/**/*.md")]
    return sorted(page for folder in folders for page in folder)
