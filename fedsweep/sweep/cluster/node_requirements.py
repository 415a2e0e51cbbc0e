"""The requirements that each node of a cluster must meet to run trials of a sweep, and functions that check them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fedsweep.common import plugins
from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import data_folder, environment
from fedsweep.federation.build_and_run import content_digests
from fedsweep.federation.run_config import RunConfig
from fedsweep.results.remote.objects import filesystem, is_uri, put, read, remove
from fedsweep.sweep.cluster.file_delivery import Item, fetch, items_of
from fedsweep.sweep.plan.plan import ENGINE_PACKAGES, Plan, engine_digest

RULE = "every node must have the same versions of fedsweep and its packages, the same data, and access to the store"
_entered: list[Needs] = []


@dataclass(frozen=True)
class Needs:
    """The requirements that each node of a cluster must meet to run trials of a sweep."""

    engine: str
    packages: Mapping[str, str]
    environment: Mapping[str, str]
    contents: tuple[tuple[Mapping[str, Any], Mapping[str, str], tuple[Item, ...]], ...]
    """For each combination of data and weights: the configuration of a run, its digests, and items that can be sent."""
    plugin_versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of the plug-in packages whose classes the sweep uses, keyed by package."""
    probe: str = ""
    """STORE#NAME of a test file or object that the driver has just written, and that the node must find."""

    @property
    def items(self) -> tuple[Item, ...]:
        """The prepared data sets and weights files that can be sent to a node, without duplicates."""
        return tuple(dict.fromkeys(item for *_, items in self.contents for item in items))

    @classmethod
    def of(cls, plan: Plan) -> Needs:
        """Return the requirements that follow from a plan.

        Call `plan.preflight` first, because it reports data and weights that are missing on this machine.
        """
        contents, used = {}, dict[str, str]()
        for config in plan.reachable():
            used |= config.plugin_versions()
            digests = plan.content_digests(config)
            key = json.dumps([digests, config.model_dump(mode="json", include={"data", "backbone", "synthetic"})])
            if key not in contents:
                contents[key] = (config.model_dump(mode="json"), digests, tuple(items_of(config)))
        return cls(engine_digest(), installed(), environment(), tuple(contents.values()), used)


@dataclass(frozen=True)
class Findings:
    """The problems of one node, and the data sets and weights that the node lacks."""

    problems: list[str] = field(default_factory=list)
    lacking: list[Item] = field(default_factory=list)
    open_to_all: bool = False
    """True if the node's Ray accepts work without a token."""


def installed() -> dict[str, str]:
    """Return the versions of the packages that affect the metrics of a run, by package name."""
    return {name: metadata.version(name) for name in ENGINE_PACKAGES}


def enter(environment: Mapping[str, str]) -> None:
    """Set the variables of `environment` in this process.

    A variable whose current value is an absolute path is not changed.
    """
    own = {name for name in environment if Path(os.environ.get(name, "")).is_absolute()}
    os.environ.update({name: value for name, value in environment.items() if name not in own})


def look(needs: Needs) -> Findings:
    """Check whether this machine meets the requirements in `needs`, and return the findings."""
    enter(needs.environment)
    if (engine := engine_digest()) != needs.engine:
        return Findings([f"has another version of fedsweep ({engine[:12]}, not {needs.engine[:12]})"])
    lacking = [item for item in needs.items if not item.is_there()]
    problems = list(dict.fromkeys(_problems(needs, lacking)))
    return Findings(problems, lacking, os.environ.get("RAY_AUTH_MODE", "").lower() != "token")


def _problems(needs: Needs, lacking: list[Item]) -> Iterator[str]:
    for name, version in installed().items():
        if version != needs.packages[name]:
            yield f"has {name} {version}, not {needs.packages[name]}"
    if others := list(_plugin_problems(needs.plugin_versions)):
        yield from others
        return  # without the plug-ins, the configurations of the runs are invalid
    if needs.probe:
        yield from _store_problems(needs.probe)
    if lacking:
        yield from _disk_problems(sum(item.bytes for item in lacking))
    for config, digests, items in needs.contents:
        if not any(item in lacking for item in items):
            yield from _content_problems(config, digests)


def _plugin_problems(needed: Mapping[str, str]) -> Iterator[str]:
    found = plugins.versions()
    for name, version in needed.items():
        if name not in found:
            yield f"lacks the plug-in {name} {version}"
        elif found[name] != version:
            yield f"has the plug-in {name} {found[name]}, not {version}"


def _store_problems(probe: str) -> Iterator[str]:
    store, name = probe.rsplit("#", 1)
    try:
        found, base = filesystem(store)
        content = read(found, f"{base}/{name}").decode()
        written = f"{base}/{name}.{content}.{os.uname().nodename}.{os.getpid()}"
        put(found, written, b"")
        remove(found, written)
    except (OSError, UserError) as error:
        if is_uri(store):
            yield f"cannot use the store {store}, for which every node needs credentials ({one_line(error)})"
        else:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else one_line(error)
            yield f"cannot use the store {store}, a folder that all nodes must share ({reason})"


def _disk_problems(size: int) -> Iterator[str]:
    root = data_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
    except OSError as error:
        yield f"lacks data, and the folder {root} cannot be created ({error.strerror})"
        return
    if not os.access(root, os.W_OK):
        yield f"lacks data, and the folder {root} is not writable"
    elif size > free:
        yield f"lacks {size / 1e9:.1f} GB of data, and {root} has only {free / 1e9:.1f} GB of free space"


def _content_problems(config: Mapping[str, Any], digests: Mapping[str, str]) -> Iterator[str]:
    try:
        found = content_digests(RunConfig.of(dict(config), "the sweep's plan"))
    except UserError as error:
        yield f"cannot read its data or weights ({one_line(error)})"
    else:
        if other := [name for name, digest in digests.items() if found[name] != digest]:
            yield f"has different {' and '.join(other)} in {data_folder()}"


@dataclass(frozen=True)
class Arrival:
    """The check that each worker runs before its first trial. The check also downloads the data that the node lacks.

    Workers on nodes that join the cluster during the sweep run this check, too.
    """

    needs: Needs
    library: Any
    """The `Library` actor, which sends the data."""

    def enter(self) -> None:
        """Check this machine, and download the data that it lacks. Later calls in the same process do nothing.

        Raises:
            UserError: The node does not meet the requirements.
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
