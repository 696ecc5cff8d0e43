"""Options of a generation are declared once: their checks, the command line and the Triton model follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import pytest
import typer

from via_sd.contract.generation_options import OPTIONS, GenerationConfig
from via_sd.contract.mode_names import EXACT_MODES, MODES, SLIM_MODES
from via_sd.contract.options import Option, Range, Served, declare, options_of
from via_sd.contract.served_model import DEFAULTS, GENERATION_INPUTS, INPUTS, parse_default, runtime_options
from via_sd.errors import RequestError
from via_sd.runtime.decoding.modes import MODE_FUNCTIONS
from via_sd.tools.commands.main import app


def test_every_field_of_the_config_is_an_option_with_a_help_text_and_a_default_that_passes_its_check() -> None:
    assert list(OPTIONS) == [field.name for field in fields(GenerationConfig)]
    for option in OPTIONS.values():
        assert option.help.endswith("."), option.name
        assert option.default is not MISSING
        assert option.check(option.default) == option.default
        assert f"{option.name}: {option.help}" in str(GenerationConfig.__doc__)


def test_generate_offers_every_option_of_the_command_line_with_its_default_and_help() -> None:
    command = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    offered = {parameter.name: parameter for parameter in command.params}
    for option in OPTIONS.values():
        if not option.command_line:
            assert option.name not in offered
            continue
        parameter = offered[option.name]
        assert parameter.help == option.help
        assert (parameter.default or ()) == (option.default or ()), option.name
        flag = option.flag.replace("_", "-")
        # A switch has one flag, which changes its default.
        on, off = ([], [f"--no-{flag}"]) if option.kind is bool and option.default else ([f"--{flag}"], [])
        assert ([each for each in parameter.opts if each.strip()], parameter.secondary_opts) == (on, off)


def test_the_triton_model_has_an_input_for_what_requests_set_and_a_default_for_what_operators_set_too() -> None:
    requests = {option.triton_name for option in OPTIONS.values() if option.served is Served.REQUEST}
    operators = {option.triton_name for option in OPTIONS.values() if option.served is Served.OPERATOR}
    assert set(GENERATION_INPUTS) == requests
    assert set(DEFAULTS) == requests | operators
    types = {spec.name: spec.data_type for spec in INPUTS}
    assert (types["max_tokens"], types["seed"], types["temperature"], types["mode"]) == (
        "INT32", "UINT64", "FP32", "STRING",
    )  # fmt: skip
    assert runtime_options({"max_tokens": parse_default("max_tokens", "5")}) == {"max_new_tokens": 5}


@dataclass(frozen=True)
class Another:
    """What a new option takes."""

    penalty: float = declare(0.0, "A penalty.", range=Range(-2, 2), served=Served.REQUEST, triton_name="p")
    words: Sequence[str] | None = declare(None, "Words.")
    length: int | None = declare(None, "A length.", range=Range(0, 10, above=True, below=True), if_none="free")


def test_an_option_knows_its_type_and_whether_it_may_be_left_open() -> None:
    assert options_of(Another) == {
        "penalty": Option(
            "penalty", float, 0.0, False, "A penalty.", Range(-2, 2), (), None, Served.REQUEST, "p",
            flag="penalty",
        ),
        "words": Option("words", tuple, None, True, "Words.", triton_name="words", flag="words"),
        "length": Option(
            "length", int, None, True, "A length.", Range(0, 10, above=True, below=True), if_none="free",
            triton_name="length", flag="length",
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("penalty", 2.5, "penalty is 2.5, wanted -2 to 2"),
        ("penalty", float("nan"), "penalty is nan, wanted -2 to 2"),
        ("penalty", "1", "penalty is '1', wanted a number"),
        ("penalty", None, "penalty is None, wanted a number"),
        ("length", 0, "length is 0, wanted more than 0 and less than 10"),
        ("length", 1.5, "length is 1.5, wanted a whole number"),
        ("words", ["a", 1], r"words is \['a', 1\], wanted strings"),
    ],
)
def test_a_bad_value_is_named_with_what_was_wanted(name: str, value: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        options_of(Another)[name].check(value)


def test_a_text_stands_for_a_value_of_the_option_s_type() -> None:
    options = {**OPTIONS, **options_of(Another)}
    texts = {"penalty": "0.5", "words": "stop", "ignore_eos": "true", "gamma": "4", "mode": "plain"}
    assert {name: options[name].parse(text) for name, text in texts.items()} == {
        "penalty": 0.5, "words": ("stop",), "ignore_eos": True, "gamma": 4, "mode": "plain",
    }  # fmt: skip
    for name, text in (("penalty", "much"), ("gamma", "4.5"), ("ignore_eos", "yes")):
        with pytest.raises(ValueError, match=f"'{text}', wanted"):
            options[name].parse(text)


def test_every_mode_that_has_a_name_has_a_function() -> None:
    assert tuple(MODE_FUNCTIONS) == MODES
    assert set(MODES) >= EXACT_MODES | SLIM_MODES
