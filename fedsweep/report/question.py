"""What a sweep asks, in the words of its search space."""

from itertools import dropwhile, takewhile
from pathlib import Path


def question(search_space: Path) -> str | None:
    """The first paragraph of comments in a search space's file; None without a file or a comment at its top."""
    if not search_space.exists():
        return None
    lines = (line.strip() for line in search_space.read_text(encoding="utf-8").splitlines())
    comments = takewhile(lambda line: line.startswith("#"), dropwhile(lambda line: not line, lines))
    words = dropwhile(lambda line: not line, (line.lstrip("#").strip() for line in comments))
    return " ".join(takewhile(bool, words)) or None
