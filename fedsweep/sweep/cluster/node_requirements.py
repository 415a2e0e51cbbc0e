"""The requirements of a sweep on each node, and the check of them that runs on the node."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import data_folder, environment
from fedsweep.federation.build_and_run import content_digests
from fedsweep.federation.run_config import RunConfig
from fedsweep.results.remote.objects import filesystem, is_uri, put, read, remove
from fedsweep.sweep.cluster.file_delivery import Item, fetch, items_of
from fedsweep.sweep.plan.code_identity import ENGINE_PACKAGES, engine_digest
from fedsweep.sweep.plan.plan import Plan

RULE = "every node must have this machine's fedsweep and packages, its store as a shared folder, and its data"


@dataclass(frozen=True)
class Needs:
    """What a node must have for a sweep."""

    engine: str
    packages: Mapping[str, str]
    environment: Mapping[str, str]
    contents: tuple[tuple[Mapping[str, Any], Mapping[str, str], tuple[Item, ...]], ...]
    """Runs that differ in what they read: a configuration, its digests, and the files that can be sent."""
    probe: str = ""
    """STORE#NAME of a file, or of an object, that the driver wrote just now."""

    @property
    def items(self) -> tuple[Item, ...]:
        """All files that can be sent, each once."""
        return tuple(dict.fromkeys(item for *_, items in self.contents for item in items))

    @classmethod
    def of(cls, plan: Plan) -> Needs:
        """What the trials of a plan read. Call after its preflight, which says what is missing on this machine."""
        contents = {}
        for config in plan.reachable():
            digests = plan.content_digests(config)
            key = json.dumps([digests, config.model_dump(mode="json", include={"data", "backbone", "synthetic"})])
            if key not in contents:
                contents[key] = (config.model_dump(mode="json"), digests, tuple(items_of(config)))
        return cls(engine_digest(), installed(), environment(), tuple(contents.values()))


@dataclass(frozen=True)
class Findings:
    """What a node found at itself."""

    problems: list[str] = field(default_factory=list)
    lacking: list[Item] = field(default_factory=list)
    open_to_all: bool = False
    """Whether its Ray takes work from anyone who reaches it."""


def installed() -> dict[str, str]:
    """Versions of the packages that decide a run's numbers."""
    return {name: metadata.version(name) for name in ENGINE_PACKAGES}


def enter(environment: Mapping[str, str]) -> None:
    """Use the driver's folders in this process, except those that the node was given when its Ray was started."""
    own = {name for name in environment if Path(os.environ.get(name, "")).is_absolute()}
    os.environ.update({name: value for name, value in environment.items() if name not in own})


def look(needs: Needs) -> Findings:
    """Compare this machine with the requirements of a sweep."""
    enter(needs.environment)
    if (engine := engine_digest()) != needs.engine:
        return Findings([f"has another version of fedsweep ({engine[:12]}, not {needs.engine[:12]})"])
    problems = []
    for name, version in installed().items():
        if version != needs.packages[name]:
            problems.append(f"has {name} {version}, not {needs.packages[name]}")
    if needs.probe and (problem := _cannot_share(needs.probe)):
        problems.append(problem)
    lacking = [item for item in needs.items if not item.is_there()]
    if lacking and (problem := _cannot_take(sum(item.bytes for item in lacking))):
        problems.append(problem)
    for config, digests, items in needs.contents:
        if not any(item in lacking for item in items) and (problem := _other_content(config, digests)):
            problems.append(problem)
    return Findings(list(dict.fromkeys(problems)), lacking, os.environ.get("RAY_AUTH_MODE", "").lower() != "token")


def _cannot_share(probe: str) -> str:
    """Return why the driver's file, or object, cannot be read here, or one written beside it; empty if both work."""
    store, name = probe.rsplit("#", 1)
    try:
        found, base = filesystem(store)
        content = read(found, f"{base}/{name}").decode()
        written = f"{base}/{name}.{content}.{os.uname().nodename}.{os.getpid()}"
        put(found, written, b"")
        remove(found, written)
    except (OSError, UserError) as error:
        if is_uri(store):
            return f"cannot use the store {store}, for which each node needs credentials ({one_line(error)})"
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else one_line(error)
        return f"cannot use the store {store}, a folder that all nodes must share ({reason})"
    return ""


def _cannot_take(size: int) -> str:
    """Return why prepared data of `size` bytes cannot be written here."""
    root = data_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
    except OSError as error:
        return f"lacks data, and {root} cannot be made ({error.strerror})"
    if not os.access(root, os.W_OK):
        return f"lacks data, and {root} cannot be written"
    return f"lacks {size / 1e9:.1f} GB of data, and {root} has {free / 1e9:.1f} GB left" if size > free else ""


def _other_content(config: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """Return how the data or weights here differ from those that the sweep was planned with."""
    try:
        run = RunConfig.of(dict(config), "the sweep's plan")
        found = content_digests(run)
        other = [name for name, digest in digests.items() if found[name] != digest]
        return f"has other {' and '.join(other)} in {data_folder()}" if other else ""
    except UserError as error:
        return f"cannot read its data or weights ({one_line(error)})"


@dataclass(frozen=True)
class Arrival:
    """What each worker of a cluster does before its first trial, so that a node that joins later is made ready too."""

    needs: Needs
    library: Any
    """The `Library` actor."""

    def enter(self) -> None:
        """Fetch what this node lacks, once.

        Raises:
            UserError: the node is not as the sweep needs it.
        """
        if self.needs in _entered:
            return
        findings = look(self.needs)
        if findings.lacking and not findings.problems:
            fetch(findings.lacking, self.library)
            findings = look(self.needs)
        if findings.problems:
            raise UserError(f"the node {os.uname().nodename} {' and '.join(findings.problems)}; {RULE}.")
        _entered.append(self.needs)


_entered: list[Needs] = []
