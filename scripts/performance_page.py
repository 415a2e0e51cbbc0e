"""Write the tables of docs/performance.md from benchmarks/results/, and draw the page's figure.

    python scripts/performance_page.py           # write the tables and docs/images/performance.png
    python scripts/performance_page.py --check   # exit with code 1 if the page or the picture is outdated

A table stands between the comments `<!-- NAME -->` and `<!-- end -->`, where NAME.json is the file of results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedsweep.report.figures import STYLE
from fedsweep.report.figures.canvas import COLOURS, panels
from fedsweep.report.text_tables import markdown_table
from results_figures import digest, drawn_from

ROOT = Path(__file__).parents[1]
PAGE, RESULTS, PICTURE = ROOT / "docs/performance.md", ROOT / "benchmarks/results", ROOT / "docs/images/performance.png"
BLOCK = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)
Content = dict[str, Any]


def numbers(head: Iterable[str], rows: Iterable[Iterable[Any]], words: int = 1) -> str:
    """Return a Markdown table whose first `words` columns are text."""
    columns, cells = list(head), [[str(cell) for cell in row] for row in rows]
    return markdown_table(columns, cells, [place < words for place in range(len(columns))])


def engine(found: Content) -> str:
    """Return the tables of benchmarks/engine.py."""
    head = ("clients", "blocks", "images", "rounds", "fedsweep, ms", "plain loop, ms", "overhead, ms", "ratio")
    rows = [[*row.values()] for row in found["rounds"]]
    heads = ("phase", "images", "GFLOP/s", "GFLOP/s of the products alone", "share")
    return f"{numbers(head, rows, 0)}\n\n{numbers(heads, ([*row.values()] for row in found['arithmetic']))}"


def hot_paths(found: Content) -> str:
    """Return the table of benchmarks/hot_paths.py."""
    columns = [*found["columns"].values()]
    head = ["phase", "kind", *(f"{what} {label}" for label in found["columns"] for what in ("CPU s", "operations"))]
    seconds = columns[-1]["seconds"]
    kinds = [(phase, kind) for phase in ("training", "evaluation") for kind in seconds[phase]]
    kinds.sort(key=lambda one: -seconds[one[0]][one[1]] - 1000 * (one[0] == "training"))
    rows = [
        (phase, kind, *(
            cell
            for one in columns
            for cell in (
                f"{one['seconds'][phase].get(kind, 0.0):.2f}",
                f"{one['operations'][phase].get(kind, 0):,}",
            )
        ))
        for phase, kind in kinds
    ]  # fmt: skip
    return numbers(head, rows, 2)


def sweep(found: Content) -> str:
    """Return the table of benchmarks/sweep.py."""
    spent, rounds = found["cpu_seconds"], found["cpu_seconds_of_rounds"]
    costs = {
        "trials, each with one seed": found["trials"],
        "rounds of a trial": found["rounds"],
        "seconds until the first trial starts": found["seconds_to_first_trial"],
        "seconds until the first round starts": found["seconds_to_first_round"],
        "milliseconds to start a later trial (median)": found["trial_start_ms"],
        "milliseconds of the driver's CPU per trial": found["driver_ms_per_trial"],
        "CPU seconds of rounds": rounds,
        "CPU seconds of imports and models in the workers": round(spent["workers"] - rounds, 1),
        "CPU seconds of the driver": spent["driver"],
        "CPU seconds of Ray's processes": spent["Ray"],
        "share of CPU seconds that train or evaluate": f"{found['useful_share']:.1%}",
    }
    return numbers(("cost", "value"), costs.items())


def cache(found: Content) -> str:
    """Return the table of benchmarks/cache.py."""
    head = ("method", "without, CPU s", "with, CPU s", "ratio", "ratio of the first trial", "cache, MB")
    return numbers(head, ([*row.values()][:-1] for row in found["rows"]))


def peers(found: Content) -> str:
    """Return the table of benchmarks/peers."""
    rows = [
        (name, row["version"], *(f"{row[key]:.2f}" for key in ("simulator", "bare", "overhead")))
        for name, row in found["rows"].items()
    ]
    return numbers(("simulator", "version", "total, ms", "bare loop, ms", "overhead, ms"), rows, 2)


def counted(found: Content) -> str:
    """Return the table of benchmarks/counted.py."""
    names = list(next(iter(found["counts"].values())))
    rows = ((part, *(f"{counts[name]:,.4g}" for name in names)) for part, counts in found["counts"].items())
    return numbers(("part", *names), rows)


TABLES: dict[str, Callable[[Content], str]] = {
    "engine_cpu": engine, "hot_paths_cpu": hot_paths, "sweep_cpu": sweep,
    "cache_cpu": cache, "peers_cpu": peers, "counted": counted,
}  # fmt: skip


def written(page: str, results: Path) -> str:
    """Return the page with the tables of the files in `results`."""

    def block(match: re.Match[str]) -> str:
        found = json.loads((results / f"{match[1]}.json").read_text())
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        origin = f"Measured on {found['date']}, {found['machine']}, load {found['load']}; {versions}."
        return f"<!-- {match[1]} -->\n\n{origin}\n\n{TABLES[match[1]](found)}\n\n<!-- end -->"

    return BLOCK.sub(block, page)


def shown(results: Path) -> list[list[tuple[str, float, float]]]:
    """Return the points of the figure's two panels, each as its series, its x and its y."""
    found = json.loads((results / "engine_cpu.json").read_text())
    overhead = [
        (f"{row['depth']} of 12 blocks", float(row["cohort"]), row["ms_overhead"])
        for row in found["rounds"]
        if row["depth"] in (1, 12) and row["rounds"] == 1 and row["batch"] == 8
    ]
    return [sorted(overhead), [(row["phase"], float(row["batch"]), 100 * row["share"]) for row in found["arithmetic"]]]


def draw(results: Path, picture: Path) -> None:
    """Draw the overhead by cohort, and the share of the speed of matrix products by batch."""
    from matplotlib import style

    data = shown(results)
    with style.context(STYLE, after_reset=True):
        figure, axes = panels(2, 2, 4.2, 3.2)
        labels = (
            ("clients in the cohort", "images in a batch"),
            ("overhead per client, ms", "speed, % of products alone"),
        )
        for place, points in enumerate(data):
            for number, series in enumerate(dict.fromkeys(name for name, _, _ in points)):
                xs, ys = zip(*((x, y) for name, x, y in points if name == series), strict=True)
                axes[place].plot(xs, ys, marker="o", color=COLOURS[number], label=series)
            axes[place].set(xscale="log", xlabel=labels[0][place], ylabel=labels[1][place])
            axes[place].minorticks_off()
            axes[place].set_xticks(ticks := sorted({x for _, x, _ in points}), [f"{tick:g}" for tick in ticks])
            axes[place].grid(axis="y")
            axes[place].legend(fontsize=8)
        axes[1].set_ylim(0, 100)
        figure.savefig(picture, dpi=150, metadata={"Software": None, "Description": digest(data)})


def main() -> None:
    """Write the page and the picture or, with `--check`, compare them with the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if anything is outdated")
    if parser.parse_args().check:
        current = written(PAGE.read_text(), RESULTS) == PAGE.read_text() and drawn_from(PICTURE) == digest(
            shown(RESULTS)
        )
        sys.exit(0 if current else "outdated; run scripts/performance_page.py")
    PAGE.write_text(written(PAGE.read_text(), RESULTS))
    draw(RESULTS, PICTURE)


if __name__ == "__main__":
    main()
