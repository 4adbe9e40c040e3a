# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of C++ sources, and the compiled libraries of a copy of the tree.

Regular expressions find the faults in code in clang-format's layout; the compiler rejects invalid ones.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from faults import Fault

_CSRC = "paddle_moe_ops/csrc"
_OBJECTS = Path("build/objects")
_OPERATORS = Path("paddle_moe_ops/_C_pd_.so")
_CORE = Path("build/core/libpmo_core.so")  # without the operators of Paddle

_STRING = r'"(?:[^"\\\n]|\\.)*"'
# Comments, strings, characters (but not the ' in 1'000) and lines of the preprocessor.
_NO_CODE = re.compile(
    rf"//[^\n]*|/\*.*?\*/|{_STRING}|(?<!\w)'(?:[^'\\\n]|\\.)+'|^ *#(?:[^\n]*\\\n)*[^\n]*", re.M | re.S
)
_OPERATOR = re.compile(r"(?<= )(?:<<|>>|&&|\|\||[<>=!]=|[-+*/]=|[-+*/%<>&|])(?= )")
_OTHER_OPERATORS = {
    "comparison": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    "arithmetic": {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&"}
    | {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*="},
    "and, or": {"&&": "||", "||": "&&"},
}
_OTHER_WORDS = {"true": "false", "std::min": "std::max", "break": "continue"}
_OTHER_WORDS |= {other: word for word, other in _OTHER_WORDS.items()}
_KINDS_OF_WORDS = {"true": "constant", "false": "constant", "break": "break, continue", "continue": "break, continue"}
_WORD = re.compile(r"\b(?:true|false|std::min|std::max|break(?=;)|continue(?=;))\b")
_INTEGER = re.compile(r"(?<![\w.'])\d+(?![\w.'])")
_FLOAT = re.compile(r"(?<![\w.])(\d+\.\d*)(?=f?\b)")
_CONDITION = re.compile(r"\b(?:if|if constexpr|while) \(")
_BRANCHES = re.compile(r" \? ([^?:;{}]+?)(\s+: )([^?:;{},]+?)(?=[,;)])")
# A statement that is a call, an assignment or an increment; in a declaration, a type precedes the name.
_STATEMENT = re.compile(
    r"(?:^ +|\) )(?!return\b|break\b|continue\b|default\b)"
    r"((?:\+\+|--|\*)?[\w:.\[\]>-]+(?:\([^;{}]*\)| [-+*/|&]?= [^;{}]*)?;)$",
    re.M,
)
_CALL, _LIST = re.compile(r"(?<=\w)\("), re.compile(r"(?<=[(, ])\{(?! *$)", re.M)
_DECLARATION = re.compile(r"\w[&*>]* [&*]?\w")
# Texts for people, and names of functions in them.
_MESSAGE = re.compile(r'"|^k?[fF]unction_?$')


def faults_of(source: bytes) -> list[Fault]:
    """Returns the faults of a source, in its order; some may not compile."""
    code = _NO_CODE.sub(_blanked, source.decode("latin-1"))
    found = []
    for kind, begin, end, text in _changes(code):
        line = code.count("\n", 0, begin) + 1
        found.append(Fault(line, kind, begin, end, text.encode("latin-1"), range(line, line + 1)))
    return sorted(set(found), key=lambda fault: (fault.begin, fault.end, fault.text))


class Libraries:
    """The compiled libraries of a copy of a tree, linked from the objects of the tree's last build."""

    def __init__(self, tree: Path, root: Path) -> None:
        self._root = root
        shutil.copytree(tree / _OBJECTS, root / _OBJECTS, ignore=shutil.ignore_patterns("*.gch"))
        for folder in ("common", "cpu", "layer"):  # tests of the core link objects, too
            shutil.rmtree(root / _CORE.parent / folder)
            (root / _CORE.parent / folder).symlink_to(root / _OBJECTS / _CSRC / folder)
        self._link()

    @contextlib.contextmanager
    def rebuilt(self, source: str) -> Iterator[bool]:
        """Compiles a changed source and links; returns whether it compiles to an object with other bytes."""
        made = self._root / _OBJECTS / Path(source).with_suffix(".o")
        kept = made.read_bytes()
        try:
            yield self._compile(source, made) and made.read_bytes() != kept and self._link()
        finally:
            made.write_bytes(kept)

    def _compile(self, source: str, made: Path) -> bool:
        compiler, _, arguments, options, _ = ast.literal_eval(made.with_suffix(".command").read_text())
        # Last of a binding's options: the precompiled header, which names files of the tree.
        options = options[: options.index("-include")] if "-include" in options else options
        return self._run([*compiler, *arguments, source, "-o", str(made), *options])

    def _link(self) -> bool:
        objects = [str(path) for path in sorted((self._root / _OBJECTS).rglob("*.o"))]
        paddle = Path(importlib.util.find_spec("paddle").origin).with_name("base")
        core = [path for path in objects if Path(path).parent.name != "paddle"]
        link = ["g++", "-shared", "-pthread"]
        return self._run([*link, *objects, f"-L{paddle}", "-l:libpaddle.so", "-o", str(_OPERATORS)]) and self._run(
            [*link, *core, "-o", str(_CORE)]
        )

    def _run(self, command: list[str]) -> bool:
        return subprocess.run(command, cwd=self._root, capture_output=True, check=False).returncode == 0


def _blanked(match: re.Match[str]) -> str:
    text = re.sub(r"[^\n]", " ", match[0])
    return f'"{text[1:-1]}"' if match[0].startswith('"') else text


def _changes(code: str) -> Iterator[tuple[str, int, int, str]]:
    """Yields kind, begin, end and replacement of each change."""
    for match in _OPERATOR.finditer(code):
        for kind, others in _OTHER_OPERATORS.items():
            if match[0] in others:
                yield kind, *match.span(), others[match[0]]
        if match[0] in ("&&", "||"):
            yield "condition dropped", match.start() - 1, _end_of_operand(code, match.end()), ""
            yield "condition dropped", _begin_of_operand(code, match.start()), match.end() + 1, ""
    for match in _WORD.finditer(code):
        yield _KINDS_OF_WORDS.get(match[0], "opposite"), *match.span(), _OTHER_WORDS[match[0]]
    for match in _INTEGER.finditer(code):
        yield "constant", *match.span(), str(int(match[0]) + 1)
    for match in _FLOAT.finditer(code):
        yield "constant", *match.span(1), str(float(match[1]) * 2 or 1.0)
    for match in re.finditer(r"!(?=[\w(])", code):
        yield "operator dropped", *match.span(), ""
    for match in _CONDITION.finditer(code):
        end = _closing(code, match.end())
        yield "condition negated", match.end(), end, f"!({code[match.end() : end]})"
    for match in _BRANCHES.finditer(code):
        if all(match[index].count("(") == match[index].count(")") for index in (1, 3)):
            yield "branches swapped", match.start(1), match.end(3), match[3] + match[2] + match[1]
    for match in _STATEMENT.finditer(code):
        yield "statement dropped", *match.span(1), ";"
    for kind, pattern in (("arguments swapped", _CALL), ("elements swapped", _LIST)):
        for match in pattern.finditer(code):
            yield from ((kind, *swap) for swap in _swaps(code, match.end()))


def _closing(code: str, begin: int) -> int:
    """Returns the place of the bracket that closes the one before `begin`."""
    depth = 1
    for place in range(begin, len(code)):
        depth += (code[place] in "([{") - (code[place] in ")]}")
        if depth == 0:
            return place
    return len(code)


def _end_of_operand(code: str, begin: int) -> int:
    depth = 0
    for place in range(begin, len(code)):
        depth += (code[place] in "([{") - (code[place] in ")]}")
        if depth < 0 or (depth == 0 and (code[place] in ";," or code.startswith((" ? ", " && ", " || "), place))):
            return place
    return len(code)


def _begin_of_operand(code: str, end: int) -> int:
    depth = 0
    for place in range(end - 1, 0, -1):
        depth += (code[place - 1] in ")]}") - (code[place - 1] in "([{")
        before = code[max(0, place - 7) : place]
        if depth < 0 or (depth == 0 and before.endswith(("&& ", "|| ", " = ", ", ", "return ", "? ", "; "))):
            return place
    return 0


def _swaps(code: str, begin: int) -> Iterator[tuple[int, int, str]]:
    """Yields begin, end and swapped text of each pair of neighbours in the list from `begin`."""
    end = _closing(code, begin)
    starts, depth = [begin], 0
    for place in range(begin, end):
        depth += (code[place] in "([{") - (code[place] in ")]}")
        if depth == 0 and code[place] == ",":
            starts.append(place + 1)
    spans = []
    for first, stop in itertools.pairwise([*starts, end + 1]):
        text = code[first : stop - 1]
        spans.append((first + len(text) - len(text.lstrip()), first + len(text.rstrip())))
    elements = [code[first:stop] for first, stop in spans]
    if any(not each or _DECLARATION.search(each) for each in elements):
        return
    for (one, other), (left, right) in zip(itertools.pairwise(elements), itertools.pairwise(spans), strict=True):
        if one != other and not _MESSAGE.search(one) and not _MESSAGE.search(other):
            yield left[0], right[1], other + code[left[1] : right[0]] + one
