"""Common exceptions, and helper functions for error handling."""

import difflib
import errno
import re
import sys
from collections.abc import Iterable, Mapping, Sequence


class UserError(Exception):
    """An error caused by the user's input. The command line prints its message and exits with code 2.

    The message is one sentence, or a list with one sentence for each mistake. A sentence states where the mistake is,
    the rule, the invalid value and similar valid names.
    """


class InvalidValuesError(UserError):
    """The error raised for invalid values of a configuration. `mistakes` contains all mistakes."""

    def __init__(self, message: str, mistakes: Mapping[str, str]) -> None:
        super().__init__(message)
        self.mistakes = dict(mistakes)
        """One sentence for each mistake, keyed by the dotted name of the value."""


def with_all_mistakes(where: str, messages: Sequence[str]) -> str:
    """Return one error message about several mistakes, or the only message unchanged.

    Args:
        where: The beginning of all messages, such as `search space mine`.
        messages: An error message for each mistake.

    >>> with_all_mistakes("search space mine", ["search space mine: `seeds` is missing."])
    'search space mine: `seeds` is missing.'
    >>> print(with_all_mistakes("mine", ["mine: `seeds` is missing.", "mine, arm full: `lora.rank` is missing."]))
    mine has 2 mistakes:
    - `seeds` is missing.
    - arm full: `lora.rank` is missing.
    """
    if len(messages) == 1:
        return messages[0]
    lines = (message.removeprefix(where).lstrip(":, ") for message in messages)
    return "\n".join([f"{where} has {len(messages)} mistakes:", *(f"- {line}" for line in lines)])


def warn(sentence: str) -> None:
    """Print a warning on stderr, as one line."""
    print(f"fedsweep: warning: {sentence}", file=sys.stderr)


def one_line(error: Exception) -> str:
    """Return the message of another library's exception on one line, without a final period.

    >>> one_line(ValueError("no such page.\\nGiving up."))
    'no such page. Giving up'
    """
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def disk_is_full(error: BaseException) -> bool:
    """Return whether the error was caused by a full disk or an exhausted quota.

    >>> disk_is_full(OSError(errno.ENOSPC, "No space left on device")), disk_is_full(OSError(errno.EACCES, "Denied"))
    (True, False)
    """
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Suggest the known names most similar to `name`, in text that can be appended to an error message.

    The result is an empty string if no known name is similar enough. `cutoff` is the smallest similarity of a suggested
    name, from 0 (no common characters) to 1 (equal).

    >>> near("lora.rnk", ["lora.rank", "seed"])
    '; did you mean `lora.rank`?'
    >>> near("zzz", ["lora.rank"])
    ''
    """
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(f'`{one}`' for one in close)}?" if close else ""


def summarise_list(names: Iterable[str], most: int = 5, sign: str = ", ", quote: str = "`") -> str:
    """Return the first `most` names in quotes, separated by `sign`, and the number of remaining names, if any.

    >>> summarise_list(["a", "b", "c"], most=2), summarise_list(["a", "b"], sign="; ", quote="")
    ('`a`, `b` and 1 more', 'a; b')
    """
    listed = [f"{quote}{name}{quote}" for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return sign.join(listed[:most]) + more


class DivergenceError(RuntimeError):
    """The error raised if training diverges, that is, if a loss or a trained tensor becomes NaN or infinite."""


def short(message: str) -> str:
    """Return the first 160 characters of a message, without a final period.

    >>> short("no."), len(short("long " * 100))
    ('no', 165)
    """
    message = message.strip().rstrip(".")
    return message if len(message) <= 160 else f"{message[:160].rstrip()} [...]"


def without_query(message: str) -> str:
    """Return the error message of a local database on one line, without the SQL query and SQLAlchemy's additions.

    >>> without_query("(raised as a result of autoflush)\\n(sqlite3.OperationalError) disk I/O error\\n[SQL: SELECT 1]")
    'disk I/O error'
    """
    whole = " ".join(message.split())
    return re.sub(r"\(raised as a result of [^)]*\) ?|\(sqlite3\.\w+\) |\[SQL: .*", "", whole).strip()
