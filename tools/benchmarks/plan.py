"""The plan of the house: packages and their rooms with lines of code, and which imports which.

    python -m tools.benchmarks.plan [OUT]

Prints a table, or writes OUT: a picture (.svg, .png, .pdf) or Mermaid text (.mmd). Imports are read from the source,
those inside functions too. An arrow that follows from others is left out of a drawing; one that is part of a cycle is
red.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import grimp
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PACKAGE = "via_sd"
#: Modules of the import root itself are one room.
GROUND = "ground"

Edges = dict[tuple[str, str], int]


@dataclass(frozen=True)
class Plan:
    """Rooms by name (`runtime`, `runtime.engines`, …), lines of code in them, and counts of imports between them.

    Attributes:
        rooms: package -> its rooms; a package without packages of its own has none.
        lines, modules: of every package and room.
        imports: between rooms; a module that lies in a package itself counts for the package.
        cycles: groups of modules, or of rooms, that import each other in a circle.
    """

    rooms: Mapping[str, tuple[str, ...]]
    lines: Mapping[str, int]
    modules: Mapping[str, int]
    imports: Edges
    cycles: tuple[tuple[str, ...], ...]

    @cached_property
    def between_packages(self) -> Edges:
        """Counts of imports between packages."""
        found: Edges = {}
        for (importer, imported), count in self.imports.items():
            ends = importer.split(".")[0], imported.split(".")[0]
            if ends[0] != ends[1]:
                found[ends] = found.get(ends, 0) + count
        return found

    def within(self, package: str) -> Edges:
        """Counts of imports between the rooms of a package.

        A name that is taken from the package itself comes from a room, and counts as an import of all it offers.
        """
        rooms = self.rooms[package]
        found = {ends: count for ends, count in self.imports.items() if ends[0] in rooms and ends[1] in rooms}
        for (importer, imported), count in self.imports.items():
            if importer in rooms and imported == package:
                homes = {target for source, target in self.imports if source == package and target in rooms}
                found |= {(importer, room): found.get((importer, room), 0) + count for room in homes - {importer}}
        return found


def read_plan(root: Path = ROOT, package: str = PACKAGE) -> Plan:
    """Read the sources of the import root `package`, which lies in `root` and was not imported from elsewhere."""
    sys.path.insert(0, str(root))
    try:
        graph = grimp.build_graph(package, cache_dir=None)
    finally:
        sys.path.remove(str(root))
    names = sorted(name for name in graph.modules if name != package and "benchmarks" not in name)
    packages = [name for name in names if root.joinpath(*name.split(".")).is_dir()]
    place = {name: _place(name, packages) for name in names}
    lines: dict[str, int] = {}
    modules: dict[str, int] = {}
    for name in names:
        for each in {place[name], place[name].split(".")[0]}:
            lines[each] = lines.get(each, 0) + _lines(root, name, name in packages)
            modules[each] = modules.get(each, 0) + 1
    imports: Edges = {}
    for name in names:
        for other in graph.find_modules_directly_imported_by(name):
            if other in place and place[other] != place[name]:
                ends = place[name], place[other]
                imports[ends] = imports.get(ends, 0) + 1
    rooms = {
        each: tuple(sorted({room for room in place.values() if room.startswith(f"{each}.")}))
        for each in dict.fromkeys(room.split(".")[0] for room in place.values())
    }
    between = {(name, other): 1 for name in names for other in graph.find_modules_directly_imported_by(name)}
    circles = (*cycles(names, between), *cycles([*rooms, *(room for each in rooms.values() for room in each)], imports))
    return Plan(rooms, lines, modules, imports, circles)


def _place(module: str, packages: Iterable[str]) -> str:
    """The room that a module lies in."""
    above, *parts = module.split(".")
    if f"{above}.{parts[0]}" not in packages:
        return GROUND
    is_room = len(parts) > 1 and ".".join([above, *parts[:2]]) in packages
    return ".".join(parts[:2]) if is_room else parts[0]


def _lines(root: Path, module: str, package: bool) -> int:
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if package else path.with_suffix(".py")
    return len(file.read_text(encoding="utf-8").splitlines())


# -- graphs ----------------------------------------------------------------------------------------------------------


def reachable(start: str, edges: Iterable[tuple[str, str]]) -> set[str]:
    """What `start` leads to over one edge or more."""
    targets: dict[str, list[str]] = {}
    for source, target in edges:
        targets.setdefault(source, []).append(target)
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in targets.get(waiting.pop(), ()):
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


def cycles(nodes: Iterable[str], edges: Edges) -> Iterator[tuple[str, ...]]:
    """Groups of nodes that all lead to each other."""
    leads_to = {node: reachable(node, edges) for node in nodes}
    seen: set[str] = set()
    for node, found in leads_to.items():
        if node in found and node not in seen:
            group = tuple(other for other in leads_to if other in found and node in leads_to[other])
            seen.update(group)
            yield group


def drawn(edges: Edges) -> list[tuple[str, str, bool]]:
    """The edges that do not follow from others, and whether each is part of a cycle."""
    circular = {(source, target) for source, target in edges if source in reachable(target, edges)}
    found = []
    for edge in edges:
        others = [other for other in edges if other != edge and other not in circular]
        if edge in circular or edge[1] not in reachable(edge[0], others):
            found.append((*edge, edge in circular))
    return found


def ranks(nodes: Iterable[str], edges: Edges) -> list[list[str]]:
    """Rows of nodes: each stands right below the lowest that imports it, members of a cycle apart."""
    straight = [(source, target) for source, target, circular in drawn(edges) if not circular]
    depth: dict[str, int] = {}

    def measure(node: str) -> int:
        if node not in depth:
            depth[node] = max((measure(source) + 1 for source, target in straight if target == node), default=0)
        return depth[node]

    rows: dict[int, list[str]] = {}
    for node in nodes:
        rows.setdefault(measure(node), []).append(node)
    return [rows[row] for row in sorted(rows)]


# -- output ----------------------------------------------------------------------------------------------------------


def mermaid(plan: Plan) -> str:
    """The plan as a Mermaid flowchart."""
    text = ["flowchart TD"]
    for package, rooms in plan.rooms.items():
        label = f"{package}<br>{plan.lines[package]:,} lines"
        if not rooms:
            text.append(f'    {package}["{label}"]')
            continue
        text.append(f'    subgraph {package}["{package}, {plan.lines[package]:,} lines"]')
        text += [f'        {room}["{room.split(".")[1]}<br>{plan.lines[room]:,}"]' for room in rooms]
        text += [f"        {source} --> {target}" for source, target, _ in drawn(plan.within(package))]
        text.append("    end")
    text += [f"    {source} --> {target}" for source, target, _ in drawn(plan.between_packages)]
    return "\n".join(text) + "\n"


def table(plan: Plan) -> Table:
    """The plan for a terminal."""
    shown = Table("room", "modules", "lines", "imports", title=_summary(plan), title_justify="left")
    for package, rooms in plan.rooms.items():
        for name in (package, *rooms):
            named = {target: count for (source, target), count in plan.imports.items() if source == name}
            imported = ", ".join(f"{target} ({named[target]})" for target in sorted(named))
            indented = name if name == package else f"  {name.split('.')[1]}"
            shown.add_row(indented, str(plan.modules[name]), f"{plan.lines[name]:,}", imported)
    return shown


def _summary(plan: Plan) -> str:
    modules = sum(plan.modules[package] for package in plan.rooms)
    lines = sum(plan.lines[package] for package in plan.rooms)
    return f"{modules} modules, {lines:,} lines, {len(plan.cycles)} cycles"


#: Sizes of the drawing, in inches.
_ROOM, _GAP, _TITLE = (1.25, 0.5), (0.3, 0.45), 0.32


def draw(plan: Plan, out: Path) -> None:
    """Write the plan as a picture; packages stand above what they import, and so do their rooms."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": PACKAGE})  # text as text; same plan, same file
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    boxes = dict(_layout(plan))
    right = max(box[0] + box[2] for box in boxes.values())
    top = max(box[1] + box[3] for box in boxes.values())
    figure = plt.figure(figsize=(right + 0.2, top + 0.5))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.1, right + 0.1), ylim=(-0.1, top + 0.4))
    axes.axis("off")
    axes.text(0, top + 0.2, _summary(plan), fontsize=10)
    for name, (x, y, width, height) in boxes.items():
        outer = name in plan.rooms
        fill, edge = ("#f3f5f8", "#5a6b7f") if outer else ("white", "#9aa7b5")
        axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, zorder=1 if outer else 2))
        label = f"{name.split('.')[-1]}  {plan.lines[name]:,}{' lines' if outer else ''}"
        at = (x + 0.08, y + height - 0.22) if outer else (x + width / 2, y + height / 2 - 0.05)
        axes.text(*at, label, fontsize=10 if outer else 9, weight="bold" if outer else None,
                  ha="left" if outer else "center", zorder=4)  # fmt: skip
    for source, target, circular in _arrows(plan):
        start, end = _ends(boxes[source], boxes[target])
        colour = "#c0392b" if circular else "#33475b"
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.1}, zorder=3)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)


def _arrows(plan: Plan) -> Iterator[tuple[str, str, bool]]:
    yield from drawn(plan.between_packages)
    for package in plan.rooms:
        yield from drawn(plan.within(package))


def _layout(plan: Plan) -> Iterator[tuple[str, tuple[float, float, float, float]]]:
    """Left, bottom, width and height of every package and room."""
    bands = [[_package(plan, package) for package in row] for row in ranks(plan.rooms, plan.between_packages)]
    widest = max(sum(each[0] for each in band) + _GAP[0] * (len(band) - 1) for band in bands)
    y = 0.0
    for band in reversed(bands):
        height = max(each[1] for each in band)
        spare = widest - sum(each[0] for each in band) - _GAP[0] * (len(band) - 1)
        x = spare / 2
        for width, own, boxes in band:
            for name, (left, bottom, *size) in boxes:
                yield name, (x + left, y + height - own + bottom, size[0], size[1])
            x += width + _GAP[0]
        y += height + _GAP[1]


def _package(plan: Plan, package: str) -> tuple[float, float, list[tuple[str, tuple[float, float, float, float]]]]:
    """Width, height and boxes of a package on its own."""
    rows = ranks(plan.rooms[package], plan.within(package))
    across, down = _ROOM[0] + _GAP[0], _ROOM[1] + _GAP[1]
    width = max(2.0, _GAP[0] + across * max((len(row) for row in rows), default=1))
    height = _TITLE + 0.08 + (down * len(rows) if rows else 0)
    boxes = [(package, (0.0, 0.0, width, height))]
    for number, row in enumerate(rows):
        left = (width - across * len(row) + _GAP[0]) / 2
        bottom = height - _TITLE - 0.1 - down * (number + 1) + _GAP[1]
        boxes += [(room, (left + across * i, bottom, *_ROOM)) for i, room in enumerate(row)]
    return width, height, boxes


def _ends(source: tuple[float, ...], target: tuple[float, ...]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where an arrow leaves the lower edge of a box and reaches the upper edge of another, or their sides."""
    middle = source[0] + source[2] / 2, target[0] + target[2] / 2
    if source[1] >= target[1] + target[3]:
        return (middle[0], source[1]), (middle[1], target[1] + target[3])
    if source[1] + source[3] <= target[1]:
        return (middle[0], source[1] + source[3]), (middle[1], target[1])
    height = source[1] + source[3] / 2, target[1] + target[3] / 2
    if middle[0] < middle[1]:
        return (source[0] + source[2], height[0]), (target[0], height[1])
    return (source[0], height[0]), (target[0] + target[2], height[1])


def main(
    out: Annotated[Path | None, typer.Argument(help=".svg, .png, .pdf or .mmd.", show_default="a table")] = None,
    root: Annotated[Path, typer.Option(help="Checkout to read.", show_default="this one")] = ROOT,
) -> None:
    """Draw the packages, their rooms and the imports between them."""
    plan = read_plan(root.resolve())
    if out is None:
        Console(width=None if sys.stdout.isatty() else 160).print(table(plan))
        for group in plan.cycles:
            print("cycle:", " ".join(group))
    elif out.suffix == ".mmd":
        out.write_text(mermaid(plan), encoding="utf-8")
    else:
        draw(plan, out)


if __name__ == "__main__":
    typer.run(main)
