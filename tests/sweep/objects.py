"""Functions that start an object store on this machine and simulate machines with an empty local copy of it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from fedsweep.results.remote.conditional_writes import objects_of
from fedsweep.results.remote.objects import filesystem

BUCKET = "bucket"
URI = f"s3://{BUCKET}/my/runs"


def object_store() -> Iterator[Any]:
    """Start an object store and yield its client. Environment variables contain its address and credentials."""
    import boto3  # slow to import, and fast test runs import this module too
    from moto.server import ThreadedMotoServer

    for opened in (filesystem, objects_of):
        opened.cache_clear()  # they may hold connections to another server
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "unguessable")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        # All servers of a process share their contents.
        urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket=BUCKET)
        yield s3
    server.stop()


def objects(client: Any) -> dict[str, int]:
    """Return the size of each object by name, without the empty objects that represent folders."""
    found = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return {one["Key"].removeprefix("my/runs/"): one["Size"] for one in found if not one["Key"].endswith("/")}


def machine(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Simulate another machine, whose local copy of the store is empty."""
    patch.setenv("FEDSWEEP_CACHE", str(folder))
    shutil.rmtree(folder, ignore_errors=True)
