"""Prints docs/commands.md: every command and option of ``hacrl``, as typer describes them, wrapped at 120 columns."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path


def page() -> str:
    """Return the page."""
    typer = Path(sys.executable).with_name("typer")
    command = [str(typer), "flows.cli", "utils", "docs", "--name", "hacrl", "--title", "Commands"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = re.sub(r'<span style="font-weight: bold">(.*?)</span>', r"`\1`", text)
    lines, fenced = [], False
    for line in text.rstrip().splitlines():
        fenced ^= line.startswith("```")
        indent = "  " if line.startswith("* ") else ""
        wrapped = [line] if fenced or len(line) <= 120 else textwrap.wrap(line, 120, subsequent_indent=indent)
        lines += wrapped or [""]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
