"""A function that checks and removes the place in a file with which error messages begin."""

import re
from pathlib import Path

PLACE = re.compile(r"(?P<file>\S+\.yaml):(?P<line>[1-9]\d*):(?P<column>[1-9]\d*): ")


def without_place(message: str) -> str:
    """Return an error message without its first part, a place in a YAML file at which a name or a value begins."""
    found = PLACE.match(message)
    assert found is not None, message
    line = Path(found["file"]).read_text().splitlines()[int(found["line"]) - 1]
    before, token = line[: int(found["column"]) - 1], line[int(found["column"]) - 1 :]
    assert re.match(r"[^\s#,:\]}]", token), (message, line)
    assert before.strip() == "" or before[-1] in " [{(,", (message, line)
    return message[found.end() :]
