"""UserError, which the command line prints before it exits with code 2, and helpers for error messages."""

import difflib
import errno
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what the user asked for, as one sentence: what, where, the rule, the value, near names."""


def one_line(error: Exception) -> str:
    """Return the message of another library's error as part of a sentence.

    >>> one_line(ValueError("no such page.\\nGiving up."))
    'no such page. Giving up'
    """
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def disk_is_full(error: BaseException) -> bool:
    """Return whether the error is a full disk or an exhausted quota.

    >>> disk_is_full(OSError(errno.ENOSPC, "No space left on device")), disk_is_full(OSError(errno.EACCES, "Denied"))
    (True, False)
    """
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint with the known names closest to `name`, or an empty string.

    >>> near("lora.rnk", ["lora.rank", "seed"])
    '; did you mean `lora.rank`?'
    >>> near("zzz", ["lora.rank"])
    ''
    """
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(f'`{one}`' for one in close)}?" if close else ""


class DivergenceError(RuntimeError):
    """A loss stopped being a number, or a trained tensor left the range of numbers."""
