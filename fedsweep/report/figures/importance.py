"""A bar chart that shows which share of the variation each factor or hyperparameter explains."""

from fedsweep.report.effects import Effects
from fedsweep.report.figures.canvas import COLOURS, Drawing, folded
from fedsweep.report.importance import FORESTS
from fedsweep.results.tsne_files import INK, blank

MOST = 20  # greatest number of bars
DECOMPOSED = (
    "Share of the variation by factor",
    (
        "Share of the variation between all finished trials. Even a factor without any effect has a share above zero "
        "because of noise. The table of main effects and interactions shows which effects the test detects."
    ),
)
SEARCHED = (
    "Importance of hyperparameters",
    (
        "Share of the variance of the objective that each hyperparameter explains alone (fANOVA with random forests). "
        f"Lines span the lowest to the highest share of {FORESTS} forests."
    ),
)


def draw(effects: Effects) -> Drawing | None:
    """Draw one bar for each share, with the largest share on top; return None if there are no shares."""
    shown = sorted(effects.shares, key=lambda one: -one.share)[:MOST]
    if not shown:
        return None
    title, reading = DECOMPOSED if effects.decomposed else SEARCHED
    figure = blank(6.0, 0.75 + 0.32 * len(shown))
    axes = figure.add_subplot()
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    places = range(len(shown))
    axes.barh(places, [100 * one.share for one in shown], height=0.62, color=COLOURS[0])
    for place, one in enumerate(shown):
        ends = [100 * end for end in one.spread or ()]
        if ends:
            axes.plot(ends, [place, place], color=INK, linewidth=1.3, marker="|", markersize=6)
        right = max([100 * one.share, *ends])
        text = f"{100 * one.share:.1f}%"
        axes.annotate(text, (right, place), (5, 0), textcoords="offset points", va="center", color=INK, fontsize=8.5)
    axes.set_yticks(places, [folded(one.name, 1, 46) for one in shown], fontsize=9)
    axes.tick_params(length=0)
    widest = max(100 * max(one.share, *(one.spread or (0.0,))) for one in shown)
    axes.set(xlim=(0, max(1.0, widest)), ylim=(len(shown) - 0.4, -0.6), xlabel="Share (%)")
    return Drawing(figure, title, reading)
