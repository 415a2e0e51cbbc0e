"""An object store on this machine, and machines that have nothing of it yet."""

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
    """The objects, seen past fedsweep. Every process finds them as it would elsewhere: by variables alone."""
    import boto3  # heavy, and modules of slow tests are imported by all others too
    from moto.server import ThreadedMotoServer

    for opened in (filesystem, objects_of):
        opened.cache_clear()  # of another server
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "unguessable")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        # Servers of one process share what they hold.
        urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket=BUCKET)
        yield s3
    server.stop()


def objects(client: Any) -> dict[str, int]:
    """Sizes by name, without the empty objects that stand for folders."""
    found = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return {one["Key"].removeprefix("my/runs/"): one["Size"] for one in found if not one["Key"].endswith("/")}


def machine(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """From now on, be a machine that has nothing of the store."""
    patch.setenv("FEDSWEEP_CACHE", str(folder))
    shutil.rmtree(folder, ignore_errors=True)
