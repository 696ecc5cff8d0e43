# ruff: noqa: E501 - templates are read on one line
"""A chat template is foreign code: whatever it does, it ends in time and in little memory, with one message."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from via_sd.contract import template_sandbox
from via_sd.contract.template_sandbox import BoundedTemplate
from via_sd.errors import RequestError

#: Templates that would take all time or all memory.
EXHAUSTING = {
    "loops in loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n > 0 %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(50) }}",
    "a macro that calls itself for ever": "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "sorting again and again": "{% for i in range(100000) %}{% set x = range(100000) | sort | list %}{% endfor %}",
    "output": "{% for a in range(100000) %}{% for b in range(1000) %}" + "a" * 50 + "{% endfor %}{% endfor %}",
    "output of a macro": "{% macro m(x) %}{% for i in range(100000) %}{{ x }}{% endfor %}{% endmacro %}{{ m('a' * 100000) }}",
    "doubling by ~": "{% set n = namespace(s='ab') %}{% for a in range(100) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by +": "{% set n = namespace(s='ab') %}{% for a in range(100) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by a block": "{% set n = namespace(s='ab') %}{% for a in range(100) %}{% set x %}{{ n.s }}{{ n.s }}{% endset %}"
    "{% set n.s = x %}{% endfor %}",
    "a billion laughs": "{% set n = namespace(s='ab') %}{% for a in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "comparing them": "{% set a = namespace(s=[1]) %}{% set b = namespace(s=[1]) %}{% for i in range(60) %}"
    "{% set a.s = [a.s, a.s] %}{% set b.s = [b.s, b.s] %}{% endfor %}{{ a.s == b.s }}",
    "squaring": "{% set n = namespace(x=3) %}{% for i in range(100) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a product": "{{ 'a' * 10000000000 }}",
    "a power": "{{ 9 ** 999999999 }}",
    "a list of long texts": "{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = n.l + ['a' * 900000] %}"
    "{% endfor %}",
    "center": "{{ 'a' | center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(10000000000) }}",
    "a width in %": "{{ '%10000000000d' % 1 }}",
    "a computed width in %": "{{ '%*d' | format(10000000000, 1) }}",
    "a width in format": "{{ '{:10000000000}'.format(1) }}",
    "a computed width in format": "{{ '{:{w}}'.format(1, w=10000000000) }}",
    "a width in format_map": "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "replace": "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
    "the filter replace": "{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}",
    "join": "{{ ('a' * 100000).join(['b'] * 100000) }}",
    "the filter join": "{{ range(100000) | list | join('a' * 100000) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "slice": "{{ [1] | slice(10000000000) | list }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
    "indent": "{{ 'a\nb' | indent(10000000000) }}",
    "tojson": "{{ [1] | tojson(indent=10000000000) }}",
    "map": "{{ range(100000) | map('center', 100000) | list | length }}",
    "a filter block": "{% filter center(10000000000) %}x{% endfilter %}",
}
RUN = """
import json, resource, sys, time
from via_sd.contract.template_sandbox import BoundedTemplate
from via_sd.errors import RequestError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
found = {}
for name, source in json.load(sys.stdin).items():
    begun = time.perf_counter()
    try:
        said = f"rendered {len(BoundedTemplate(source).render({'messages': []}))} characters"
    except RequestError as error:
        said = str(error)
    found[name] = (said, time.perf_counter() - begun)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[str, float]]:
    """What became of each, in a process with 1 GiB of address space; loops that need the clock are cut short."""
    run = RUN.replace("found = {}", "import via_sd.contract.template_sandbox as box\nbox.SECONDS = 0.3\nfound = {}")
    done = subprocess.run(
        [sys.executable, "-c", run],
        input=json.dumps(EXHAUSTING),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str, float]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", EXHAUSTING)
def test_a_template_that_exhausts_the_machine_is_stopped(name, outcomes):
    said, seconds = outcomes[name]
    assert said.startswith(("the chat template was stopped: ", "the chat template cannot render")), said
    assert "MemoryError" not in said
    assert seconds < 5


def test_a_long_conversation_may_make_long_texts():
    """The limits grow with what the caller gives."""
    messages = [{"role": "user", "content": "word " * 100_000} for _ in range(20)]
    template = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    text = BoundedTemplate(template).render({"messages": messages})
    assert text.count("word") == 2_000_000


def test_a_slow_template_is_stopped_by_the_clock(monkeypatch):
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.05)
    with pytest.raises(RequestError, match=r"it ran for more than 0\.05 s"):
        BoundedTemplate("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}").render({})


def test_the_variables_a_template_reads_are_known():
    template = BoundedTemplate(
        "{% set x = 1 %}{{ x }}{{ tools }}{% if y is defined %}{{ strftime_now('%Y') }}{% endif %}"
    )
    assert template.variables == {"tools", "y"}
