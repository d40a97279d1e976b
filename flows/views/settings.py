"""Settings in the terminal and as the page docs/configuration.md."""

from collections.abc import Iterator
from textwrap import wrap

from rich.console import Console
from rich.markup import escape

from hacrl_core.config.reference import Setting, campaign_settings, sweep_settings


def show_settings(console: Console, settings: list[Setting]) -> None:
    """Print one paragraph per setting: key and type in a line, the meaning below it."""
    for setting in settings:
        default = f"  [dim]default[/dim] {escape(setting.default)}" if setting.default not in ("", "required") else ""
        required = "  [yellow]required[/yellow]" if setting.default == "required" else ""
        kind = f"  [dim](kind: {setting.of_kind})[/dim]" if setting.of_kind else ""
        console.print(
            f"[bold]{escape(setting.key)}[/bold]{kind}  [cyan]{escape(setting.type)}[/cyan]{required}{default}",
            highlight=False,
        )
        console.print(f"    {escape(setting.description)}", highlight=False)


def settings_page() -> str:
    """Return docs/configuration.md: every setting of campaigns and sweeps, a list per group."""
    lines = [
        "# Configuration",
        "",
        "Every setting of a campaign and of a sweep. `hacrl config explain KEY` shows the same in the terminal,",
        "`hacrl config show CONFIG` a config with its defaults filled in, and `hacrl config schema` the JSON schema",
        "for editors. This page is written by `make reference` from the config models.",
        "",
        "A file may begin with `extends: other.yaml`: its settings are merged over that file's, and `null` removes a",
        "key. `--set key=value` overrides a setting on the command line. `*` stands for any name or list element.",
        "",
        "## A campaign",
        *_lists(campaign_settings()),
        "",
        "## A sweep",
        *_lists(sweep_settings()),
    ]
    return "\n".join(lines) + "\n"


def _lists(settings: list[Setting]) -> Iterator[str]:
    """Yield Markdown: settings without a group first, then a list for each first part of a key."""
    groups: dict[str, list[Setting]] = {"": []}
    for setting in settings:
        first, dot, _ = setting.key.partition(".")
        groups.setdefault(first if dot else "", []).append(setting)
    for group, members in groups.items():
        yield ""
        if group:
            yield f"### {group}"
            yield ""
        for setting in members:
            default = f", default `{setting.default}`" if setting.default not in ("", "required") else ""
            required = ", required" if setting.default == "required" else ""
            kind = f" of kind `{setting.of_kind}`" if setting.of_kind else ""
            text = f"* **`{setting.key}`**{kind} ({setting.type}{required}{default}): {setting.description}"
            yield from wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    print(settings_page(), end="")
