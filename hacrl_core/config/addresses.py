"""Addresses with a user and a password in them: ``http://user:password@host``."""

from urllib.parse import unquote, urlsplit


def without_userinfo(url: str) -> str:
    """Return an address as it may be shown: without user and password."""
    try:
        place = urlsplit(url).netloc
    except ValueError:
        # No address that anything could connect to; what is before the last @ may still be a password.
        return url.rpartition("@")[2]
    return url.replace(place, place.rpartition("@")[2], 1) if "@" in place else url


def userinfo(url: str) -> tuple[str, str] | None:
    """Return the user and the password of an address; None if it names neither."""
    place = urlsplit(url).netloc
    if "@" not in place:
        return None
    user, _, password = place.rpartition("@")[0].partition(":")
    return unquote(user), unquote(password)


def is_http(url: str) -> bool:
    """Return whether this is the address of a web server, and not of a database."""
    return url.lower().startswith(("http://", "https://"))
