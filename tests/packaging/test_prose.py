# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Sentences of docstrings and comments begin with a noun or a verb; the number of others may only shrink."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Number of sentences in a folder that may begin with one of `OPENINGS`; all other folders have none. Lower an entry
# when its folder improves, and remove it at 0. Never raise one: reword the sentence.
ALLOWED: dict[str, int] = {}
FOLDERS = ("benchmarks", "examples", "paddle_moe_ops", "tests", "tools")

OPENINGS = ("Of", "That of", "Those of", "By", "What", "Where", "Which", "How", "Whether", "Who")
OPENING = re.compile(rf"\b(?:{'|'.join(OPENINGS)})\b")
END_OF_SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`])|\n\s*\n")


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, its classes and its functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


def comments(source: str) -> Iterator[str]:
    """The comments; lines of one block are joined, a comment after code stands alone."""
    found = [
        (token.start[0], token.line.lstrip().startswith("#"), token.string.lstrip("#: "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    blocks = ((line - index, alone or -line, text) for index, (line, alone, text) in enumerate(found))
    for _, block in groupby(blocks, key=lambda each: each[:2]):
        yield "\n".join(text for *_, text in block)


def flagged(source: str) -> list[str]:
    """The sentences that begin with one of `OPENINGS`; questions count as well."""
    if not OPENING.search(source):  # most files, which need no parser
        return []
    texts = [*docstrings(source), *comments(source)]
    sentences = (sentence for text in texts for sentence in END_OF_SENTENCE.split(text))
    return [" ".join(each.split()) for each in sentences if OPENING.match(each.strip())]


def flagged_in(folder: str) -> list[str]:
    """The flagged sentences of a top-level folder, each with its file."""
    return [
        f"{path.relative_to(ROOT).as_posix()}: {each}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for each in flagged(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_begin_with_a_noun_or_a_verb(folder):
    sentences, allowed = flagged_in(folder), ALLOWED.get(folder, 0)
    assert len(sentences) <= allowed, (
        f"{len(sentences)} sentences of {folder} begin with one of {', '.join(OPENINGS)}, but at most {allowed} may. "
        "Begin the new ones with a noun or a verb:\n" + "\n".join(sentences)
    )
    assert len(sentences) == allowed, (
        f"{folder} has improved: set its entry of ALLOWED in {Path(__file__).name} from {allowed} to {len(sentences)}"
        f"{', that is, remove it' if not sentences else ''}"
    )


def test_the_counted_sentences():
    source = '''"""Returns a plan.

What it holds. By the way, Of it.
"""

x = 1  # Whether it is one
# Which rows
# are moved. Rows of
# Where a line begins.
y = 2  # Ofen
'''
    assert Counter(each.split()[0] for each in flagged(source)) == Counter(["What", "By", "Whether", "Which"])
