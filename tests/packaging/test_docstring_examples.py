# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Every public function and class has an example in its docstring, and the examples run as they stand."""

from __future__ import annotations

import doctest
import inspect
import re
import sys

import pytest

from paddle_moe_ops import explain, unpatch_paddle
from tests.packaging import public_api
from tests.packaging.subprocesses import ROOT, run_forked

# The oracle is read, not called by programs. Families of other packages have the signatures of the originals;
# docs/migrating*.md show their calls side by side with those.
WITHOUT_EXAMPLES = ("reference", "compat", "dispatch", "indexed", "masked", "rowmaps")
_BY_PADDLEFORMERS = "needs PaddleFormers; tests/integrations/test_page.py runs its calls in docs/integrations.md"
NO_EXAMPLE = dict.fromkeys(("Report", "applied", "apply", "remove"), _BY_PADDLEFORMERS)
# Examples that start Fleet, which a process cannot undo.
IN_A_PROCESS_OF_ITS_OWN = ("paddle_moe_ops.expert_parallel.fleet.distributed_optimizer",)
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
STATE = "paddle.nn.functional.moe_permute and moe_unpermute: Paddle itself"


def public_objects() -> dict[str, object]:
    """Public functions and classes by the module that defines them and their name."""
    found = {}
    for module in public_api.public_modules():
        folder = module.__name__.split(".")[1:2]
        if folder and folder[0] in WITHOUT_EXAMPLES:
            continue
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                found[f"{value.__module__}.{name}"] = value
    return found


def examples() -> dict[str, doctest.DocTest]:
    """The examples of `public_objects` and of the methods and properties of the classes, by name."""
    documented = dict(public_objects())
    for name, value in public_objects().items():
        own = vars(value) if inspect.isclass(value) else {}
        members = {key: each for key, each in own.items() if inspect.isroutine(each) or isinstance(each, property)}
        documented |= {f"{name}.{key}": each for key, each in members.items() if not key.startswith("_")}
    parser, found = doctest.DocTestParser(), {}
    for name, value in documented.items():
        test = parser.get_doctest(inspect.getdoc(value) or "", {}, name, None, None)
        if test.examples:
            found[name] = test
    return found


OBJECTS, EXAMPLES = public_objects(), examples()


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_name_has_an_example(name):
    if name.rpartition(".")[2] in NO_EXAMPLE:
        assert name not in EXAMPLES, "remove it from NO_EXAMPLE"
        return
    assert name in EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_site_shows_an_example_as_code(name):
    """The documentation site knows the section "Examples:"; "Example:" would be quoted text."""
    before, heading, section = EXAMPLES[name].docstring.partition("\nExamples:\n")
    assert heading
    assert ">>>" not in before
    assert not re.search(r"^\S", section, re.MULTILINE), "the section must be the last one"


@pytest.mark.filterwarnings("ignore:AmpScaler can only be enabled")  # on a CPU
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name):
    if name in IN_A_PROCESS_OF_ITS_OWN:
        code = f"from {__name__} import failures_of\nsys.exit(failures_of({name!r}))"
        done = run_forked(code, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    texts: list[str] = []
    assert failures_of(name, texts.append) == 0, "".join(texts)
    state = explain("permute")
    unpatch_paddle()  # for the other examples, if this one left it
    assert STATE in state
    assert "the family" not in state
    assert "chosen by: automatic" in state


class Checker(doctest.OutputChecker):
    """Treats shapes that newer versions of Paddle print as ``paddle.Size([3, 64])`` as ``[3, 64]``."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, re.sub(r"paddle\.Size\((\[[\d, ]*\])\)", r"\1", got), optionflags)


def failures_of(name: str, out=sys.stdout.write) -> int:
    """Run an example in a namespace of its own, and return the number of lines that failed."""
    test = doctest.DocTest(EXAMPLES[name].examples, {"__name__": "example"}, name, None, None, None)
    return doctest.DocTestRunner(Checker(), optionflags=OPTIONS).run(test, out=out).failed


def test_the_runner_finds_a_wrong_result(monkeypatch):
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    monkeypatch.setitem(EXAMPLES, "wrong", wrong)
    texts: list[str] = []
    assert failures_of("wrong", texts.append) == 1
    assert "Expected:\n    3\nGot:\n    2" in "".join(texts)
