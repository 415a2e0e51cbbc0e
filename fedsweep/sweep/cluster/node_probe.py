"""What two machines of a cluster tell each other: where files are, whether they share a folder, and what went wrong."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedsweep.common.errors import UserError, one_line
from fedsweep.results import Store
from fedsweep.results.remote.objects import filesystem, is_uri, put, read, remove


def enter(environment: Mapping[str, str]) -> None:
    """Find the driver's folders in this process, but for those that the node was given when its Ray was started."""
    own = {name for name in environment if Path(os.environ.get(name, "")).is_absolute()}
    os.environ.update({name: value for name, value in environment.items() if name not in own})


def shares(probe: str | Path) -> str:
    """Why the driver's file, or object, cannot be read here, or one written beside it; empty where it can."""
    if is_uri(probe):
        return _reaches(str(probe))
    path = Path(probe)
    try:
        beside = path.with_name(f"{path.name}.{path.read_text()}.{os.getpid()}")
        beside.touch()
        beside.unlink()
    except OSError as error:
        return f"cannot use the store {path.parent}, a folder that all nodes must share ({error.strerror})"
    return ""


def _reaches(probe: str) -> str:
    store, name = probe.rsplit("#", 1)
    try:
        found, base = filesystem(store)
        beside = f"{base}/{name}.{read(found, f'{base}/{name}').decode()}.{os.uname().nodename}.{os.getpid()}"
        put(found, beside, b"")
        remove(found, beside)
    except (OSError, UserError) as error:
        return f"cannot use the store {store}, for which each node needs credentials ({one_line(error)})"
    return ""


@contextmanager
def probed(store: Store) -> Iterator[str]:
    """A file, or an object, that only who shares the store can read."""
    name, content = f".shared-{secrets.token_hex(4)}", secrets.token_hex(4)
    if store.uri:
        found, base = filesystem(store.uri)
        put(found, f"{base}/{name}", content.encode())
        try:
            yield f"{store.uri}#{name}"
        finally:
            remove(found, f"{base}/{name}")
        return
    store.root.mkdir(parents=True, exist_ok=True)
    path = store.root / name
    path.write_text(content)
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def last_line(error: Exception) -> str:
    """What went wrong on the other side: Ray's message is a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
