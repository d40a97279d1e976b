"""Text of models, datasets and other programs, made safe to print."""

# Newlines and tabs stay. The others get the symbols that Unicode has for them, and C1 controls, which some terminals
# obey as well, a replacement character.
_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def printable(text: str) -> str:
    """Return the text with its control characters as visible symbols.

    A terminal obeys escape sequences in what it is given: they move the cursor, change its title or write to the
    clipboard. Without the control character that begins it, a sequence is plain text.
    """
    return text.translate(_PICTURES)
