"""Jinja for chat templates: the environment transformers gives them, with limits of time and size.

A template comes with somebody's model, so it is foreign code. Jinja's sandbox keeps it from Python's internals, but
lets it loop for hours or build a text of gigabytes. Here every loop, call, filter and printed value passes a `_Budget`.
It refuses a value before it is built where one operation can make much of little (`replace`, `*`, `center`), and after
it is built where the operation is bounded by its operands.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from datetime import datetime
from time import perf_counter
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from via_sd.errors import RequestError

#: Seconds one rendering may take. Real templates take milliseconds.
SECONDS = 3.0
#: Characters and items a value may have, beyond some for each that the conversation itself has.
SIZE, SIZE_PER_INPUT = 1_000_000, 16
#: How many times that all values of one rendering may have together.
ALL_VALUES = 64
#: Characters a template's source may have; the longest published ones have some 30,000.
SOURCE = 500_000
_POWER_BITS = 4096
_FORMAT_NUMBER = re.compile(r"\d{5,}|%[^%a-zA-Z]*\*|\{[^{}]*\{")


class LimitExceeded(TemplateError):  # noqa: N818 - the name is the message
    """A template asked for more than it may have."""


class _Budget:
    """What one rendering may still use."""

    def __init__(self, inputs: Any) -> None:
        self._deadline = perf_counter() + SECONDS
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._limit: float = math.inf  # the caller may give what the engine can take
        self._limit = SIZE + SIZE_PER_INPUT * self._size(inputs)
        self._printed = self._made = 0

    def tick(self) -> None:
        if perf_counter() > self._deadline:
            raise LimitExceeded(f"it ran for more than {SECONDS:g} s")

    def allow(self, size: int) -> None:
        """Refuse a value of that size."""
        if size > self._limit:
            raise LimitExceeded(f"it makes a value of {size} characters or items, more than the {self._limit} allowed")

    def allow_numbers(self, values: Iterable[Any]) -> None:
        """Refuse numbers that would be sizes (a width, a count) beyond the limit."""
        for value in values:
            if isinstance(value, (int, float)) and not -self._limit <= value <= self._limit:
                raise LimitExceeded(f"it uses the number {value!r:.40} where numbers are widths or counts")

    def weigh(self, value: Any) -> Any:
        """`value`, if its size is allowed, and that of all values so far together."""
        self.tick()
        if not isinstance(value, Namespace):
            size = self._size(value)
            self.allow(size)
            self._made += size
            if self._made > ALL_VALUES * self._limit:
                raise LimitExceeded(f"its values have {self._made} characters and items together, which is too much")
        return value

    def size(self, value: Any) -> int:
        return self._size(value)

    def print(self, size: int) -> None:
        """Count text that goes to the output, or to a block that is captured."""
        self.tick()
        self._printed += size
        self.allow(self._printed)

    def _size(self, value: Any) -> int:
        """Characters and items, nested ones as often as they are referred to."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 3
        if isinstance(value, Namespace):
            raise LimitExceeded("it puts a namespace into a list or a dictionary")
        if not isinstance(value, (list, tuple, set, frozenset, dict, KeysView, ValuesView, ItemsView)):
            return 1
        known = self._sizes.get(id(value))
        if known is None:
            parts: Iterable[Any] = (
                (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
            )
            total = len(value)
            for part in parts:
                total += self._size(part)
                self.allow(total)
            # The value is kept, or its id could be another's.
            known = self._sizes[id(value)] = (value, total)
        return known[1]


_BUDGET: ContextVar[_Budget | None] = ContextVar("budget", default=None)


def _budget() -> _Budget:
    budget = _BUDGET.get()
    if budget is None:  # Jinja evaluates constants while it compiles, and leaves to the rendering what it cannot
        raise nodes.Impossible
    return budget


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's tokens for training; what it encloses is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Callable[[], str]) -> str:
        return caller()


class _Limited(NodeTransformer):
    """Puts the budget into a template: loops and macros tick, what builds values weighs them."""

    # Jinja's visitor goes by these names.

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    visit_Macro = visit_CallBlock = visit_For  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("weighed", [node], node)

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("weighed", [node], node) if node.ctx == "load" else node

    def _ticking(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        text += sum(len(const.value) for const in node.find_all(nodes.Const) if isinstance(const.value, str))
        self.generic_visit(node)
        tick = nodes.ExprStmt(_call("tick", [nodes.Const(text)], node)).set_lineno(node.lineno)
        node.body.insert(0, tick)
        return node


def _call(method: str, arguments: list[Any], at: Any) -> nodes.Node:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None).set_lineno(at.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_printed
        )
        self.filters["tojson"] = _tojson
        for name in ("urlize", "striptags", "pprint", "xmlattr"):  # HTML, and debugging: unbounded, and used by nobody
            del self.filters[name]
        self.filters = {name: _guarded(name, each) for name, each in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "namespace": _Namespace,
        }

    # What `_Limited` has put into the template; Jinja finds these as attributes of the environment.

    def tick(self, text: int) -> None:
        _budget().print(text)

    def weighed(self, value: Any) -> Any:
        return _budget().weigh(value)

    def joined(self, *parts: Any) -> str:
        budget = _budget()
        budget.allow(sum(budget.size(part) for part in parts))
        return "".join(map(str, parts))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        budget.tick()
        if (owner := getattr(function, "__self__", None)) is self:
            return function(*args)  # what Jinja passes by name concerns functions that take the context
        if isinstance(owner, str):
            _allow_amplifier(function.__name__, owner, args, kwargs)
        return budget.weigh(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's safe `str.format`, within the budget."""
        form = super().wrap_str_format(value)
        if form is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _allow_format(value.__self__, (*args, *kwargs.values()))
            return form(*args, **kwargs)

        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget()
        if operator == "*" and (isinstance(left, int) != isinstance(right, int)):
            value, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int):
                budget.allow(budget.size(value) * max(times, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _POWER_BITS:
                raise LimitExceeded(f"it computes a power with the exponent {right!r:.40}")
        elif operator == "%" and isinstance(left, str):
            _allow_format(left, right if isinstance(right, tuple) else (right,))
        return budget.weigh(super().call_binop(context, operator, left, right))


class _Namespace(Namespace):
    """Jinja's namespace without underscore names (a way to CPython's internals) and with its values weighed."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may call a value `self`
        self, *rest = args
        values = dict(*rest, **kwargs)
        Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace takes no name that begins with an underscore, and {name!r} does")
        if isinstance(value, Namespace):
            raise LimitExceeded("it puts a namespace into another")
        super().__setitem__(name, _budget().weigh(value))


def _printed(value: Any) -> Any:
    budget = _BUDGET.get()
    if budget is not None:
        budget.print(budget.size(value) if not isinstance(value, Namespace) else 1)
    return value


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the budget."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        if name == "format":
            _allow_format(args[0], (*args[1:], *kwargs.values()))
        elif name != "tojson":
            # Environment or context may come before the value.
            value = next((arg for arg in args if isinstance(arg, (str, list, tuple))), "")
            _allow_amplifier(name, value, args[args.index(value) + 1 :] if value in args else args, kwargs)
        return budget.weigh(function(*args, **kwargs))

    return guarded


def _allow_amplifier(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse methods and filters whose result could be far larger than all they are given."""
    budget, given = _budget(), [*args, *kwargs.values()]
    if name == "replace" and isinstance(value, str):
        old, new = [each for each in given if isinstance(each, str)][:2] or ["", ""] if len(given) > 1 else ("", "")
        found = value.count(old) if old else len(value) + 1
        budget.allow(len(value) + found * len(new))
    elif name == "join":
        parts = value if not isinstance(value, str) else next((g for g in given if isinstance(g, (list, tuple))), [])
        glue = value if isinstance(value, str) else next((g for g in given if isinstance(g, str)), "")
        budget.allow(budget.size(parts) + len(glue) * len(parts))
    elif name == "expandtabs" or name == "indent":
        lines = value.count("\t" if name == "expandtabs" else "\n") + 1 if isinstance(value, str) else 1
        widths = [len(g) if isinstance(g, str) else g for g in given if isinstance(g, (str, int))]
        budget.allow(lines * max(widths, default=8))
    elif name == "translate":
        longest = max(
            (len(v) for g in given if isinstance(g, dict) for v in g.values() if isinstance(v, str)), default=1
        )
        budget.allow(len(value) * longest)
    elif name in ("center", "ljust", "rjust", "zfill", "batch", "slice", "wordwrap", "truncate", "round"):
        budget.allow_numbers(given)


def _allow_format(form: Any, values: Iterable[Any]) -> None:
    """Refuse widths of five digits or more, those that come from a value, and templates that multiply long values."""
    budget, form = _budget(), str(form)
    if _FORMAT_NUMBER.search(form):
        raise LimitExceeded("it formats with a width of five digits or more, or one that is computed")
    budget.allow(len(form) + (form.count("%") + form.count("{")) * (10_000 + sum(budget.size(v) for v in values)))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    budget = _budget()
    width = 1 if indent is None else len(indent) if isinstance(indent, str) else max(int(indent), 1)
    budget.allow(width * budget.size(value))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


_ENVIRONMENT: list[_Environment] = []


def _environment() -> _Environment:
    if not _ENVIRONMENT:
        _ENVIRONMENT.append(_Environment())
    return _ENVIRONMENT[0]


class BoundedTemplate:
    """A compiled template.

    Attributes:
        variables: names it reads without setting them.

    Raises:
        RequestError: the template is not one.
    """

    def __init__(self, source: str) -> None:
        if len(source) > SOURCE:
            raise RequestError(f"the chat template has {len(source)} characters, wanted {SOURCE} or fewer")
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            self._template: Template = environment.from_string(_Limited().visit(tree))
        except TemplateError as error:
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            raise RequestError(f"the chat template cannot be parsed: {error}{line}") from None
        except Exception as error:  # noqa: BLE001 - foreign code; a nesting that Python cannot compile, say
            raise RequestError(f"the chat template cannot be compiled: {_reason(error)}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text.

        Raises:
            RequestError: the template refuses, fails, or exceeds `SECONDS` or `SIZE`.
        """
        budget = None
        try:
            budget = _Budget(dict(variables))
            token = _BUDGET.set(budget)
            try:
                return self._template.render(variables)
            finally:
                _BUDGET.reset(token)
        except LimitExceeded as error:
            raise RequestError(f"the chat template was stopped: {error}") from None
        except Exception as error:  # noqa: BLE001 - foreign code: a sum of a number and a text, a division by zero, …
            raise RequestError(f"the chat template cannot render this conversation: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
