"""The wheel holds all of the sources but the benchmarks, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.benchmarks.wheel import FOLDERS, ROOT, Contents, build_wheel, read_wheel, source_files

pytest.importorskip("build", reason="needs the dev extra")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    if not all((ROOT / folder).is_dir() for folder in FOLDERS):
        pytest.skip("the sources left, so that the installed wheel is what the tests run against")
    return read_wheel(build_wheel(tmp_path_factory.mktemp("wheel")))


def test_the_wheel_holds_every_source_and_nothing_else(wheel: Contents) -> None:
    assert wheel.differences(source_files()) == []
    assert len(wheel.files) > 100
    assert {"via_sd/py.typed", "via_sd/tools/bench/report.html.j2"} < wheel.files.keys()


def test_benchmarks_and_tests_stay_in_the_repository(wheel: Contents) -> None:
    assert {name.split("/")[0] for name in wheel.files} == {"via_sd"}
    assert not [name for name in wheel.files if {"benchmarks", "tests"} & set(Path(name).parts)]


def test_a_file_that_is_lacking_and_one_too_many_are_both_named() -> None:
    found = Contents({"via_sd/a.py": 1, "export/b.py": 1}, {}, 2)
    assert found.differences({"via_sd/a.py", "via_sd/c.json"}) == [
        "the wheel lacks via_sd/c.json",
        "export/b.py is in the wheel and is no source",
    ]
