"""Hooks of mkdocs: links that lead out of docs/ become plain text, because the site has no such page."""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page's text with links into the source tree replaced by their texts."""
    docs, here = Path(config["docs_dir"]).resolve(), Path(page.file.abs_src_path).parent

    def inside(match: re.Match[str]) -> str:
        text, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match.group()
        place = (here / target.partition("#")[0]).resolve()
        return match.group() if place.is_relative_to(docs) and place.is_file() else text

    return _LINK.sub(inside, markdown)
