"""Access to object stores that pyarrow can open.

A store is given by a URI without credentials, such as s3://BUCKET/RUNS.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, urlsplit

from fedsweep.common.errors import UserError, disk_is_full, one_line

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
SECRETS = re.compile(r"key|secret|token|password|credential", re.IGNORECASE)
FLAT = ("s3", "gcs", "abfs")
"""Kinds of stores without folders, in which an object becomes visible only when it is complete."""
PAUSES = (1.0, 4.0, 10.0)  # seconds between attempts
Answer = TypeVar("Answer")


class UnreachableError(OSError):
    """The error raised if all attempts to access an object store fail."""


def is_uri(address: str | Path) -> bool:
    """Return whether an address is a URI rather than a folder.

    >>> is_uri("s3://bucket/runs"), is_uri("mlruns"), is_uri(Path("mlruns"))
    (True, False, False)
    """
    return bool(URI.match(str(address)))


@cache
def filesystem(uri: str) -> tuple[FileSystem, str]:
    """Return pyarrow's file system for a URI, and the path in that file system to which the URI refers.

    Raises:
        UserError: pyarrow cannot open the URI, or the URI contains credentials or does not name a bucket.
    """
    _check_secrets(uri)
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem

    # With this option, a small file is sent in one request instead of three.
    quick = f"{uri}{'&' if '?' in uri else '?'}allow_delayed_open=true" if uri.startswith("s3://") else uri
    try:
        found, base = FileSystem.from_uri(quick)
    except (OSError, ValueError, ArrowException) as error:
        rule = "must be a folder or a URI that pyarrow can open, such as s3://BUCKET/RUNS"
        raise UserError(f"`--store` {rule}, but `{uri}` is not: {one_line(error)}.") from None
    if found.type_name == "mock" or not base:
        raise UserError(f"`--store` must name a bucket, such as s3://BUCKET/RUNS, but it is `{uri}`.")
    return found, base


def _check_secrets(uri: str) -> None:
    """Raise UserError if the URI contains credentials, because logs and the process list would show them to others."""
    try:
        parts = urlsplit(uri)
        named = any(SECRETS.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    except ValueError as error:
        raise UserError(f"`--store` is not a valid URI: {one_line(error)}.") from None
    if named or parts.password is not None or (parts.scheme == "s3" and parts.username is not None):
        shown = re.sub("//.*@", "//***@", uri.partition("?")[0])
        usual = "environment variables or the usual files, such as ~/.aws/credentials"
        raise UserError(f"`--store` must not contain credentials, but `{shown}` does; put them into {usual}.")


def check_there(uri: str) -> None:
    """Raise UserError unless the store's bucket exists and is accessible."""
    found, base = filesystem(uri)
    if found.type_name not in FLAT:
        return
    bucket = base.split("/")[0]
    try:
        info = found.get_file_info(bucket)
    except OSError as error:
        raise UserError(f"the store {uri} cannot be reached: {one_line(error)}.") from None
    if info.type.name == "NotFound":
        raise UserError(f"the store {uri} cannot be used: there is no bucket `{bucket}`.")


def check_writable(uri: str) -> None:
    """Raise UserError unless objects under the URI can be written, read and deleted."""
    check_there(uri)
    found, base = filesystem(uri)
    name, content = f"{base}/.write-{secrets.token_hex(4)}", secrets.token_bytes(8)
    try:
        put(found, name, content)
        same = read(found, name) == content
        found.delete_file(name)
    except OSError as error:
        raise UserError(f"the store {uri} cannot be written: {one_line(error)}.") from None
    if not same:
        raise UserError(f"the store {uri} cannot be used: it did not return the content that was written.")


def put(filesystem: FileSystem, path: str, content: bytes) -> None:
    """Write an object atomically. If writing fails, raise OSError and leave an existing object unchanged."""
    flat = filesystem.type_name in FLAT
    folder, _, name = path.rpartition("/")
    target = path if flat else f"{folder}/.{name}.{secrets.token_hex(4)}"
    if not flat:
        filesystem.create_dir(folder, recursive=True)
    stream = filesystem.open_output_stream(target)
    stream.write(content)
    stream.close()  # only if writing succeeded, because closing creates the object
    if not flat:
        filesystem.move(target, path)


def read(filesystem: FileSystem, path: str) -> bytes:
    """Return the contents of an object, or raise OSError if it cannot be read."""
    with filesystem.open_input_file(path) as file:
        content: bytes = file.readall()
    return content


def remove(filesystem: FileSystem, path: str) -> None:
    """Delete an object if it exists. Raise OSError if it cannot be deleted."""
    with contextlib.suppress(FileNotFoundError):
        filesystem.delete_file(path)


def persistently(do: Callable[[], Answer], pauses: Sequence[float] | None = None) -> Answer:
    """Call a function that uses an object store, repeat the call if it fails, and return its result.

    Args:
        do: The function to call.
        pauses: Seconds to wait before each repetition; None for the default pauses.

    Raises:
        UnreachableError: Every attempt failed.
        OSError: The disk of this machine is full, or a file is missing. In these cases, the call is not repeated.
    """
    left = iter(PAUSES if pauses is None else pauses)
    while True:
        try:
            return do()
        except OSError as error:
            if isinstance(error, FileNotFoundError) or disk_is_full(error):
                raise
            if (pause := next(left, None)) is None:
                raise UnreachableError(one_line(error)) from error
            time.sleep(pause)
