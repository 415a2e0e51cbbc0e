"""Conditional writes to object stores.

This module uses the package `obstore`, because pyarrow does not support conditional writes.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import secrets
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store
from pyarrow.fs import FileSystem

from fedsweep.common.errors import one_line
from fedsweep.results.remote.lease import Found, UnconditionalObjects
from fedsweep.results.remote.objects import filesystem

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

SLOWEST = timedelta(seconds=20)  # time limit of one request of `obstore`


class ConditionalObjects:
    """Access to the objects of a store that supports conditional writes.

    A path begins with the name of the bucket, as in pyarrow.
    """

    exclusive = True

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def read(self, path: str) -> Found:
        """Return an object's content, modification time and version, or an empty `Found` if there is no such object."""
        with _os_errors(), contextlib.suppress(FileNotFoundError):
            found = obstore.get(self.store, _key(path))
            version = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name]}
            return Found(bytes(found.bytes()), found.meta["last_modified"].timestamp(), version)
        return Found()

    def write(self, path: str, content: bytes, version: Any) -> None:
        """Write an object only if its current version is `version`. Otherwise, do nothing.

        If `version` is None, write the object only if it does not exist yet.
        """
        with _os_errors(), contextlib.suppress(AlreadyExistsError, PreconditionError):
            obstore.put(self.store, _key(path), content, mode=version or "create")

    def remove(self, path: str) -> None:
        """Delete an object if it exists."""
        with _os_errors(), contextlib.suppress(FileNotFoundError):
            obstore.delete(self.store, _key(path))


def _key(path: str) -> str:
    return path.partition("/")[2]


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except BaseError as error:
        raise OSError(one_line(error).partition(" Debug source:")[0]) from None


@cache
def objects_of(uri: str) -> ConditionalObjects | UnconditionalObjects:
    """Return an object that reads and writes the objects of a store.

    Writes are conditional if `obstore` can open the store and a test of conditional writes succeeds.
    """
    files, base = filesystem(uri)
    with contextlib.suppress(Exception):  # obstore may lack credentials, or may not support this kind of store
        found = ConditionalObjects(_conditional_store(uri, files, base.partition("/")[0]))
        probe = f"{base}/.conditional-{secrets.token_hex(8)}"
        found.write(probe, b"1", None)
        first = found.read(probe)
        found.write(probe, b"2", None)
        found.write(probe, b"3", first.version)
        found.write(probe, b"4", first.version)
        conditional = found.read(probe).content == b"3"
        found.remove(probe)
        if conditional:
            return found
    return UnconditionalObjects(files)


def _conditional_store(uri: str, files: FileSystem, bucket: str) -> ObjectStore:
    address = urlsplit(uri)
    words, host = dict(parse_qsl(address.query)), address.hostname or ""
    client: ClientConfig = {"timeout": SLOWEST, "connect_timeout": SLOWEST / 4, "allow_http": True}
    retries: RetryConfig = {"max_retries": 2, "retry_timeout": SLOWEST}
    if files.type_name == "s3":
        options = {"region": files.region, **_keys_of_profile()}
        if endpoint := words.get("endpoint_override"):
            options["endpoint"] = endpoint if "://" in endpoint else f"{words.get('scheme', 'https')}://{endpoint}"
        return S3Store(bucket, client_options=client, retry_config=retries, **options)
    if files.type_name == "gcs" and not words:
        return GCSStore(bucket, client_options=client, retry_config=retries)
    if files.type_name == "abfs" and host.endswith(".core.windows.net"):
        account = host.partition(".")[0]
        return AzureStore(bucket, account_name=account, client_options=client, retry_config=retries)
    raise ValueError(f"fedsweep does not open {files.type_name} stores with obstore")


def _keys_of_profile() -> dict[str, str]:
    """Return the access keys in ~/.aws/credentials, which `obstore` does not read.

    The dict is empty if AWS_ACCESS_KEY_ID is set, because this environment variable takes precedence.
    """
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser())
    profile = os.environ.get("AWS_PROFILE") or "default"
    names = ("access_key_id", "secret_access_key", "session_token")
    return {name: parser[profile][f"aws_{name}"] for name in names if parser.has_option(profile, f"aws_{name}")}
