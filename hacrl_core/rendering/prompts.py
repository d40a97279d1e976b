"""Render a problem's messages as the token ids that an agent continues."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from hacrl_core.errors import EngineError
from hacrl_core.rendering.plain_text import encode_plain_text, specials_of

# Stands for special-token text inside a message while the template renders. U+FFFFE is a noncharacter: no text has it.
_PLACEHOLDER = "\U000ffffe{index}\U000ffffe"
_PLACEHOLDERS = re.compile("\U000ffffe([0-9]+)\U000ffffe")


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    chat_template: str | None = None,
    *,
    add_bos: bool | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of the conversation up to where the assistant's answer starts.

    There is at most one BOS token, whether the template or the tokenizer writes it. ``add_bos``: None does as the
    tokenizer does, True ensures one (for a model that needs it and a tokenizer that omits it), False adds none to what
    the template writes. ``template_options`` go to the template (``{"enable_thinking": False}``). Text in a message
    that spells a special token stays text: a problem cannot end its own turn.
    """
    if not messages:
        raise EngineError("render_prompt: no messages; a problem needs at least one message with role and content")
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise EngineError(f"{_name(tokenizer)}: the tokenizer has no chat template; set chat_template for this agent")
    hidden_messages, hidden = _hide_specials(messages, specials_of(tokenizer).pattern)
    text = _apply_template(tokenizer, hidden_messages, chat_template, dict(template_options or {}))
    ids: list[int] = []
    # Template text and hidden indices alternate.
    for index, part in enumerate(_PLACEHOLDERS.split(text)):
        if index % 2:
            ids += encode_plain_text(tokenizer, hidden[int(part)])
        elif part:
            options = {"add_special_tokens": False, "split_special_tokens": False, "verbose": False}
            ids += [int(token_id) for token_id in tokenizer.encode(part, **options)]
    return _with_bos(tokenizer, ids, _adds_bos(tokenizer) if add_bos is None else add_bos)


def _hide_specials(
    messages: Sequence[Mapping[str, Any]], pattern: re.Pattern[str] | None
) -> tuple[list[dict[str, str]], list[str]]:
    """Return the messages with placeholders for special-token text, and the texts behind the placeholders."""
    hidden: list[str] = []

    def hide(match: re.Match[str]) -> str:
        hidden.append(match.group())
        return _PLACEHOLDER.format(index=len(hidden) - 1)

    clean = []
    for message in messages:
        fields = {
            key: value.encode("utf-8", "replace").decode().replace("\U000ffffe", "") for key, value in message.items()
        }
        if pattern is not None and "content" in fields:
            fields["content"] = pattern.sub(hide, fields["content"])
        clean.append(fields)
    return clean, hidden


def _apply_template(
    tokenizer: Any, messages: list[dict[str, str]], template: str | None, options: dict[str, Any]
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **options
        )
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message.get("role", "?") for message in messages)
        raise EngineError(
            f"{_name(tokenizer)}: the chat template refuses messages with roles {roles}: {error}; "
            "change the messages (some templates take no system text) or set chat_template for this agent"
        ) from error
    if not text:
        raise EngineError(f"{_name(tokenizer)}: the chat template renders nothing; set chat_template for this agent")
    return str(text)


def _adds_bos(tokenizer: Any) -> bool:
    """Return whether the tokenizer itself starts a plain text with BOS."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer.encode("0", add_special_tokens=True))[:1] == [bos]


def _with_bos(tokenizer: Any, ids: list[int], wanted: bool) -> list[int]:
    bos = tokenizer.bos_token_id
    if wanted and bos is None:
        raise EngineError(f"{_name(tokenizer)}: add_bos is set but the tokenizer has no BOS token; set its bos_token")
    return [int(bos), *ids] if wanted and ids[:1] != [bos] else ids


def _name(tokenizer: Any) -> str:
    return f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
