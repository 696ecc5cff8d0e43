"""The plan of the packages: read from the imports, drawn without the arrows that follow from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.benchmarks.plan import Plan, cycles, draw, drawn, mermaid, ranks, read_plan

pytest.importorskip("matplotlib", reason="needs the search extra")

CHAIN = {("a", "b"): 1, ("b", "c"): 1, ("a", "c"): 5}
CIRCLE = {("a", "b"): 1, ("b", "c"): 1, ("c", "b"): 1, ("c", "d"): 1}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources with two packages, of which one has rooms, behind links as ours are."""
    root = tmp_path_factory.mktemp("house")
    sources = {
        "upper/__init__.py": "",
        "upper/attic/__init__.py": "def late():\n    from home.upper.hall import stairs\n",
        "upper/hall/__init__.py": "",
        "upper/hall/stairs.py": "import home.lower\nimport home.words\n",
        "lower/__init__.py": "import home.words\n\n\n",
        "home/__init__.py": "",
        "home/words.py": "WORDS = 1\n",
    }
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for package in ("upper", "lower"):
        (root / "home" / package).symlink_to(Path("..") / package)
    return root


@pytest.fixture(scope="module")
def plan(house: Path) -> Plan:
    return read_plan(house, "home")


def test_rooms_lines_and_imports_are_those_of_the_sources(plan: Plan) -> None:
    assert plan.rooms == {"ground": (), "lower": (), "upper": ("upper.attic", "upper.hall")}
    assert (plan.lines["upper"], plan.lines["upper.hall"], plan.lines["lower"], plan.lines["ground"]) == (4, 2, 3, 1)
    assert (plan.modules["upper"], plan.modules["upper.hall"]) == (4, 2)
    assert plan.imports == {
        ("upper.attic", "upper.hall"): 1,
        ("upper.hall", "lower"): 1,
        ("upper.hall", "ground"): 1,
        ("lower", "ground"): 1,
    }
    assert plan.cycles == ()


def test_an_arrow_that_follows_from_others_is_left_out_and_one_of_a_cycle_is_not() -> None:
    assert drawn(CHAIN) == [("a", "b", False), ("b", "c", False)]
    assert drawn(CIRCLE) == [("a", "b", False), ("b", "c", True), ("c", "b", True), ("c", "d", False)]
    assert list(cycles("abcd", CIRCLE)) == [("b", "c")]
    assert list(cycles("abc", CHAIN)) == []


def test_what_is_imported_stands_below_what_imports_it() -> None:
    assert ranks("cba", CHAIN) == [["a"], ["b"], ["c"]]
    assert ranks("abcd", {("a", "c"): 1, ("b", "c"): 1, ("a", "d"): 1}) == [["a", "b"], ["c", "d"]]


def test_the_drawing_has_a_box_with_its_lines_for_every_package_and_room(plan: Plan, tmp_path: Path) -> None:
    draw(plan, tmp_path / "plan.svg")
    picture = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    for label in ("upper  4 lines", "attic  2", "hall  2", "lower  3 lines", "ground  1 lines", "0 cycles"):
        assert label in picture
    draw(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_flowchart_has_the_arrows_of_the_drawing(plan: Plan) -> None:
    lines = [line.strip() for line in mermaid(plan).splitlines()]
    assert [line for line in lines if "-->" in line] == [
        "upper.attic --> upper.hall",
        "lower --> ground",
        "upper --> lower",
    ]
