"""A digest of code files, which tells whether code has changed."""

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePath

CODE = {".py", ".json", ".safetensors"}
"""Endings of the files of a package that can affect the results of a run."""


def is_code(name: PurePath) -> bool:
    """Return whether a relative path names a code file that is not hidden.

    Editors create hidden files and links, such as `.#module.py`, while a file is being edited.
    """
    return name.suffix in CODE and not any(part.startswith(".") for part in name.parts)


def code_files(folder: Path, root: Path) -> dict[PurePath, Path]:
    """Return the code files in a folder and its subfolders, keyed by the path relative to `root`."""
    found = {path.relative_to(root): path for path in folder.rglob("*") if path.suffix in CODE}
    return {name: path for name, path in found.items() if is_code(name) and path.is_file()}


def digest(files: Mapping[PurePath, Path]) -> str:
    """Return the SHA-256 (hex digits) of the relative paths, which are the keys, and the contents of files."""
    found = hashlib.sha256()
    for name in sorted(files):
        found.update(name.as_posix().encode())
        found.update(files[name].read_bytes())
    return found.hexdigest()
