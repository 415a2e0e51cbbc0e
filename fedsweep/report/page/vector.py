"""An SVG file as a part of a page: with ids of its own, as wide as the page, and named for who cannot see it."""

from pathlib import Path
from xml.etree import ElementTree

LINK = "{http://www.w3.org/1999/xlink}href"
SVG = "{http://www.w3.org/2000/svg}"
PIXELS_PER_POINT = 4 / 3


def inline(path: Path, prefix: str) -> str:
    """The drawing of a file that `figures.canvas` wrote, as an element of HTML; its texts are escaped.

    Matplotlib counts ids from one in each file, so that two on a page would take each other's shapes: each begins with
    the prefix here, and so does what refers to it. `<prefix>-title` is the id of the title.
    """
    root = ElementTree.fromstring(path.read_bytes())  # noqa: S314 - written by this program
    for parent in list(root.iter()):
        for child in list(parent):
            # A style in a page's SVG is one for the whole page; what this one says is in report.css.
            if child.tag in (f"{SVG}metadata", f"{SVG}style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        element.attrib = {_plain(name): _own(name, value, prefix) for name, value in element.attrib.items()}
    _resize(root)
    name = root.find("title")
    if name is not None:
        name.set("id", f"{prefix}-title")
        root.attrib |= {"role": "img", "aria-labelledby": f"{prefix}-title"}
    return ElementTree.tostring(root, encoding="unicode")


def _plain(name: str) -> str:
    """An attribute as HTML knows it, which has no name spaces."""
    return "href" if name == LINK else name


def _own(name: str, value: str, prefix: str) -> str:
    """The attribute's value with the prefix before an id."""
    if name == "id":
        return f"{prefix}-{value}"
    if name == LINK and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    return value.replace("url(#", f"url(#{prefix}-")


def _resize(root: ElementTree.Element) -> None:
    """As wide as it was drawn, in pixels; what the page has no room for, report.css takes away."""
    width = round(float(root.attrib.pop("width").removesuffix("pt")) * PIXELS_PER_POINT)
    root.attrib.pop("height")
    root.attrib.pop("version", None)
    root.set("style", f"width:{width}px")
