"""Script that starts Ray like a sweep, and prints who can reach it.

The three lines of the output are the listening addresses, the answer to an unknown client, and the paths of Ray's
sockets that another user could open or replace.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

from fedsweep.sweep.cluster.ray_session import ray_session

STRANGER = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None)
    print("let in")
except Exception as error:
    print(" ".join(str(error).split()))
"""


def addresses() -> list[str]:
    """Return the addresses of all sockets on which this process or one of its descendants listens."""
    table = {}
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A":
                table[inode] = readable(local.split(":")[0])
    return [table[inode] for pid in family_of(os.getpid()) for inode in sockets(pid) if inode in table]


def readable(address: str) -> str:
    """Convert the kernel's hexadecimal IPv4 or IPv4-mapped address to dotted form; return others unchanged."""
    if len(address) == 32 and not address.startswith("0000000000000000FFFF0000"):
        return address
    word = address[-8:]
    return ".".join(str(int(word[place : place + 2], 16)) for place in (6, 4, 2, 0))


def sockets(pid: int) -> list[str]:
    """Return the inodes of a process's sockets."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.append(target[8:-1])
    return found


def family_of(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def exposed(path: Path) -> bool:
    """Return whether another user could open the file at `path`, or put another file in its place.

    Both need a way through all parent folders, unless one of the folders can itself be replaced.
    """
    hidden = False
    for folder in reversed(path.parents):
        mode = folder.stat().st_mode
        if not hidden and mode & 0o022 and not mode & stat.S_ISVTX:
            return True
        hidden = hidden or (mode & 0o077 == 0 and folder.stat().st_uid == os.getuid())
    return not hidden


if __name__ == "__main__":
    with ray_session():
        import ray

        ray.get(ray.remote(family_of).remote(0))  # wait until a worker has started
        print(*addresses())
        unknown = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        head = ray.get_runtime_context().gcs_address
        asked = [sys.executable, "-c", STRANGER, head]
        told = subprocess.run(asked, env=unknown | {"RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True)
        print(told.stdout.strip() or told.stderr.strip().splitlines()[-1])
        there = [one for one in Path(os.environ["RAY_TMPDIR"]).rglob("*") if stat.S_ISSOCK(one.lstat().st_mode)]
        print(len(there), *(one for one in there if exposed(one)))
