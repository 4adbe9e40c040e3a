# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the guides: ``python tools/drawings.py`` writes docs/drawings/*.svg.

The same source gives the same bytes. tests/packaging/test_drawings.py compares the numbers with the outputs of
`route`, and the files with the committed ones. A drawing has its own card, whose colours follow the reader's colour
scheme. So it is readable on a page of either colour, even if page and scheme differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[1] / "docs" / "drawings"

# ---- the example of docs/concepts.md, and the outputs of `route` for it

NUM_EXPERTS = 3
IDS = ((0, 2), (2, -1), (1, 0))
SLOT_TO_ROW = ((0, 3), (4, -1), (2, 1))
ROW_TO_TOKEN = (0, 2, 2, 0, 1)
ROW_TO_EXPERT = (0, 0, 1, 2, 2)

ALIGNMENT = 4
PADDED_ROW_TO_TOKEN = (0, 2, -1, -1, 2, -1, -1, -1, 0, 1, -1, -1)
PADDED_OFFSETS = (0, 4, 8, 12)
BUFFER_SIZE = 4
BUFFER_ROW_TO_TOKEN = (0, 2, 2, 0)
OVERFLOW = 1

MASK = ((True, False, True), (False, False, True), (True, True, False))
ROW_ID_MAP = ((3, 0, -1, 2, 0, -1, 2), (4, -1, -1, 2, -1, -1, 1), (2, 1, -1, 1, 0, -1, 2))

# Source, target and shape of each map of a plan.
MAPS = {
    "token_rows": ("tokens", "rows", "[T, K]"),
    "row_to_token": ("rows", "tokens", "[N]"),
    "slot_to_row": ("slots", "rows", "[T, K]"),
    "row_to_slot": ("rows", "slots", "[N]"),
    "row_to_expert": ("rows", "experts", "[N]"),
    "expert_offsets": ("experts", "rows", "[E + 1]"),
}

# ---- the example of docs/expert_parallel.md: two ranks with two tokens and two experts each

RANKS = 2
RANK_EXPERTS = 2
RANK_IDS = (((0, 2), (1, 0)), ((3, 1), (2, 3)))  # by rank and token
ARRIVED = ((0, 1, 2), (0, 2, 3))  # tokens by rank
LOCAL_ROW_TO_TOKEN = ((0, 1, 1, 2), (0, 3, 2, 3))  # by rank and row
LOCAL_ROW_TO_EXPERT = ((0, 0, 1, 1), (2, 2, 3, 3))

WIDTH = 480  # in a column of a phone, letters of 14 are still 10 pixels high
STYLE = """
svg { --card: #ffffff; --edge: #c3cad2; --ink: #1f2933; --muted: #55606b; --none: #eef1f4;
  --f0: #d3e5ff; --s0: #2f6fbf; --f1: #ffe3bd; --s1: #b5660b;
  --f2: #d5f0d3; --s2: #2e8540; --f3: #eedcf9; --s3: #8a4bb3; }
@media (prefers-color-scheme: dark) {
  svg { --card: #161b22; --edge: #4a535e; --ink: #e8edf2; --muted: #a3adb8; --none: #262c34;
    --f0: #1d3b63; --s0: #78aefc; --f1: #57390f; --s1: #f0a64a;
    --f2: #1d4728; --s2: #6fcf80; --f3: #45295a; --s3: #c894ec; }
}
text { font: 14px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--ink); }
.head { font-weight: 600; }
.note { font-size: 13px; fill: var(--muted); }
.code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
path { fill: none; stroke-width: 1.6; stroke: var(--muted); }
polygon { fill: var(--muted); }
rect { stroke-width: 1.4; fill: var(--card); stroke: var(--edge); }
rect.plain { stroke: var(--muted); }
rect.none { fill: var(--none); }
rect.gone { fill: none; stroke-dasharray: 4 3; stroke: var(--muted); }
"""
_TOKENS = "".join(
    f"rect.t{token} {{ fill: var(--f{token}); stroke: var(--s{token}); }}\n"
    f"path.t{token} {{ stroke: var(--s{token}); }}\npolygon.t{token} {{ fill: var(--s{token}); }}\n"
    for token in range(4)
)


class Drawing:
    """A drawing: shapes on a card, WIDTH wide.

    Args:
        title: description, for readers who don't see it.
        height: of the card.
    """

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.lines: list[str] = []  # under the boxes
        self.shapes: list[str] = []

    def text(self, x: float, y: float, text: str, classes: str = "") -> None:
        """Add a line of text; y is its base line."""
        kind = f' class="{classes}"' if classes else ""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}"{kind}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, text: str, kind: str = "plain") -> None:
        """Add a rectangle with its text in the middle; kind: plain, none, gone or t and a token."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect {size} rx="4" class="{kind}"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 5, text, "middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, kind: str = "", *, down: bool = False) -> None:
        """Add a curved arrow from one point to another, with its head at the end; both ends point right, or down."""
        tag = f' class="{kind}"' if kind else ""
        head = 7.0
        if down:
            step = head if to_y > y else -head
            end, middle = to_y - step, (y + to_y) / 2
            bow = f"C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {end:g}"
            points = f"{to_x:g},{to_y:g} {to_x - 4.5:g},{end:g} {to_x + 4.5:g},{end:g}"
        else:
            end, middle = to_x - head, (x + to_x) / 2
            bow = f"C{middle:g} {y:g} {middle:g} {to_y:g} {end:g} {to_y:g}"
            points = f"{to_x:g},{to_y:g} {end:g},{to_y - 4.5:g} {end:g},{to_y + 4.5:g}"
        self.lines.append(f'<path{tag} d="M{x:g} {y:g} {bow}"/>')
        self.lines.append(f'<polygon{tag} points="{points}"/>')

    def bracket(self, x: float, y: float, width: float, text: str) -> None:
        """Add a bracket at y, with its text below."""
        self.lines.append(f'<path d="M{x + 2:g} {y:g} v6 h{width - 4:g} v-6"/>')
        self.text(x + width / 2, y + 22, text, "note middle")

    def cells(self, x: float, y: float, width: float, tokens: Sequence[int]) -> None:
        """Add rows side by side: their numbers, below them the token of each; -1 is padding."""
        for row, token in enumerate(tokens):
            self.text(x + (row + 0.5) * width, y - 6, str(row), "note middle")
            kind, text = ("none", "0") if token < 0 else (f"t{token}", f"t{token}")
            self.box(x + row * width + 1, y, width - 2, 30, text, kind)

    def svg(self) -> str:
        """Return the text of the file."""
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        card = f'<rect x="0.7" y="0.7" width="{WIDTH - 1.4:g}" height="{self.height - 1.4:g}" rx="8"/>'
        notice = "<!-- Copyright 2026 The paddle_moe_ops authors\n     SPDX-License-Identifier: Apache-2.0\n"
        parts = [
            f"{notice}     Made by tools/drawings.py. -->",
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">',
            f'<title id="title">{escape(self.title)}</title>',
            f"<style>{STYLE}{_TOKENS}</style>",
            card,
            *self.lines,
            *self.shapes,
            "</svg>",
        ]
        return "\n".join(parts) + "\n"


def segments(experts: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """Yield each expert of rows in expert order, with its first row and its number of rows."""
    for expert in sorted(set(experts)):
        yield expert, experts.index(expert), experts.count(expert)


def tokens_slots_rows() -> Drawing:
    """Draw three columns: a token's slots, and the row of each slot."""
    drawing = Drawing("Three tokens, their six slots, and the five rows of three experts", 322)
    for x, text in ((56, "tokens"), (202, "slots"), (400, "rows")):
        drawing.text(x, 28, text, "head middle")
    rows = {}  # the place of each row
    y = 40.0
    for expert, first, count in segments(ROW_TO_EXPERT):
        drawing.text(400, y + 16, f"expert {expert}", "note middle")
        for row in range(first, first + count):
            rows[row] = y + 24 + (row - first) * 33
            token = ROW_TO_TOKEN[row]
            drawing.box(336, rows[row], 128, 30, f"row {row}: token {token}", f"t{token}")
        y += 24 + count * 33 + 4
    for token, (ids, places) in enumerate(zip(IDS, SLOT_TO_ROW, strict=True)):
        y = 46 + token * 86
        drawing.box(16, y + 17, 80, 30, f"token {token}", f"t{token}")
        for column, (expert, row) in enumerate(zip(ids, places, strict=True)):
            slot, top = token * len(ids) + column, y + column * 34
            text = f"{slot}: expert {expert}" if expert >= 0 else f"{slot}: none"
            drawing.box(147, top, 110, 30, text, f"t{token}" if expert >= 0 else "gone")
            if expert >= 0:
                drawing.arrow(96, y + 32, 145, top + 15, f"t{token}")
                drawing.arrow(257, top + 15, 334, rows[row] + 15, f"t{token}")
    drawing.text(16, 308, "A row's colour is that of its token.", "note")
    return drawing


def padding_and_buffer() -> Drawing:
    """Draw three strips of rows: as they are, padded, and in a buffer that is too small."""
    drawing = Drawing("The rows of three experts: as they are, with padding, and in a buffer of fixed size", 404)
    x, width = 18.0, 37.0

    def strip(y: float, title: str, tokens: Sequence[int], parts: Iterable[tuple[int, int, int]]) -> None:
        drawing.text(x, y, title, "code")
        drawing.cells(x, y + 34, width, tokens)
        for expert, first, count in parts:
            name = f"expert {expert}" if count > 1 else f"e{expert}"
            drawing.bracket(x + first * width, y + 69, count * width, name)

    strip(28, f"route(ids, num_experts={NUM_EXPERTS})", ROW_TO_TOKEN, segments(ROW_TO_EXPERT))
    starts = zip(range(NUM_EXPERTS), PADDED_OFFSETS, PADDED_OFFSETS[1:], strict=False)
    padded = [(expert, first, end - first) for expert, first, end in starts]
    strip(152, f"..., padding_alignment={ALIGNMENT})", PADDED_ROW_TO_TOKEN, padded)
    kept = segments(ROW_TO_EXPERT[:BUFFER_SIZE])
    strip(276, f"..., buffer_size={BUFFER_SIZE})", BUFFER_ROW_TO_TOKEN, kept)
    for row in range(BUFFER_SIZE, BUFFER_SIZE + OVERFLOW):
        drawing.box(x + row * width + 13, 310, width - 2, 30, f"t{ROW_TO_TOKEN[row]}", "gone")
    drawing.text(x + (BUFFER_SIZE + OVERFLOW) * width + 20, 330, f"does not fit: overflow = {OVERFLOW}", "note")
    drawing.text(x, 390, "t0, t1, t2: a row's token. 0: a row of padding, all zeros.", "note")
    return drawing


def plan_maps() -> Drawing:
    """Draw tokens, slots, rows and experts as boxes, and the maps between them as arrows."""
    drawing = Drawing("The maps of a plan between tokens, slots, rows and experts", 388)
    places = {"tokens": (16, 40), "slots": (248, 40), "rows": (16, 178), "experts": (16, 316)}
    for name, classes in (("tokens", "t0"), ("slots", "t1"), ("rows", "t2"), ("experts", "t3")):
        width = 448 if name == "rows" else 216
        drawing.box(*places[name], width, 44, {"tokens": "tokens: T", "rows": "rows: N"}.get(name, ""), classes)
    drawing.text(356, 58, "slots: T x K", "middle")
    drawing.text(356, 76, "slot = token x K + k", "note middle")
    drawing.text(124, 334, "experts: E", "middle")
    drawing.text(124, 352, "tokens_per_expert [E]", "code middle")
    drawing.box(248, 316, 216, 44, "probabilities", "plain")
    columns = dict(zip(MAPS, (28, 140, 256, 362, 28, 148), strict=True))
    for name, (source, target, shape) in MAPS.items():
        x, low = columns[name], "experts" in (source, target)
        top, bottom = (222, 316) if low else (84, 178)
        ends = (top, bottom - 2) if (target == "experts" or (target == "rows" and not low)) else (bottom, top + 2)
        _labelled(drawing, x, ends, name, shape)
    _labelled(drawing, 276, (222, 314), "row_probs", "[N]")
    drawing.text(16, 24, "Each arrow is a tensor of the plan; -1 leads nowhere.", "note")
    drawing.text(16, 379, "token_rows is ascending: the order in which rows are added up.", "note")
    return drawing


def _labelled(drawing: Drawing, x: float, ends: tuple[float, float], name: str, shape: str) -> None:
    """Add a vertical arrow, with the name and the shape of a map next to it."""
    drawing.arrow(x, ends[0], x, ends[1], down=True)
    middle = sum(ends) / 2
    drawing.text(x + 8, middle - 4, name, "code")
    drawing.text(x + 8, middle + 14, shape, "note")


def mask_maps() -> Drawing:
    """Draw a mask, its row_id_map, and the rows that the map names."""
    drawing = Drawing("A mask of tokens and experts, its row_id_map, and the rows", 322)
    cell, left, right = 34.0, 66.0, 210.0
    drawing.text(left, 26, "mask [T, E]", "code")
    drawing.text(right, 26, "row_id_map [T, 2E + 1]", "code")
    for expert in range(NUM_EXPERTS):
        drawing.text(left + (expert + 0.5) * cell, 50, f"e{expert}", "note middle")
    for token, (choices, numbers) in enumerate(zip(MASK, ROW_ID_MAP, strict=True)):
        y = 58 + token * 34
        drawing.text(58, y + 20, f"token {token}", "note end")
        for expert, chosen in enumerate(choices):
            kind = f"t{token}" if chosen else "none"
            drawing.box(left + expert * cell + 1, y, cell - 2, 30, "1" if chosen else "", kind)
        for column, number in enumerate(numbers):
            of_row = column < NUM_EXPERTS and number >= 0
            kind = f"t{token}" if of_row else "none" if number < 0 else "plain"
            drawing.box(right + column * cell + 1, y, cell - 2, 30, str(number), kind)
    drawing.bracket(right, 166, NUM_EXPERTS * cell, "rows, last first")
    drawing.bracket(right + NUM_EXPERTS * cell, 166, NUM_EXPERTS * cell, "experts")
    drawing.bracket(right + 2 * NUM_EXPERTS * cell, 166, cell, "n")
    drawing.text(left, 222, "rows", "head")
    drawing.cells(right, 222, cell, ROW_TO_TOKEN)
    for expert, first, count in segments(ROW_TO_EXPERT):
        name = f"expert {expert}" if count > 1 else f"e{expert}"
        drawing.bracket(right + first * cell, 257, count * cell, name)
    drawing.text(16, 308, "n: how many rows the token has. -1: nothing.", "note")
    return drawing


def expert_parallelism() -> Drawing:
    """Draw two ranks, from their tokens at the top to the sums of these tokens at the bottom."""
    drawing = Drawing("Two ranks: tokens are dispatched, become rows of local experts, and are combined", 520)
    lefts, span = (98.0, 290.0), 174.0
    owned = [tuple(rank * len(ids) + token for token in range(len(ids))) for rank, ids in enumerate(RANK_IDS)]
    ids = {token: RANK_IDS[rank][number] for rank, own in enumerate(owned) for number, token in enumerate(own)}
    for rank, left in enumerate(lefts):
        shape = f'x="{left - 8:g}" y="38" width="{span + 14:g}" height="434" rx="8"'
        drawing.lines.insert(0, f'<rect {shape} class="none"/>')
        drawing.text(left + span / 2, 27, f"rank {rank}", "head middle")
    stages = ((72, "tokens"), (100, "experts"), (130, "dispatch"), (178, "arrived"), (230, "plan"), (284, "rows"))
    for y, text in (*stages, (336, "products"), (398, "combine"), (452, "sums")):
        drawing.text(14, y, text, "head" if text in ("dispatch", "plan", "products", "combine") else "note")

    def boxes(y: float, tokens: Sequence[int], left: float) -> dict[int, float]:
        """Add boxes of tokens in a line; return the middle of each."""
        width = span / len(tokens)
        middles = {token: left + (place + 0.5) * width for place, token in enumerate(tokens)}
        for token, middle in middles.items():
            drawing.box(middle - width / 2 + 3, y, width - 6, 28, f"t{token}", f"t{token}")
        return middles

    tops = [boxes(56, own, left) for own, left in zip(owned, lefts, strict=True)]
    ends = [boxes(434, own, left) for own, left in zip(owned, lefts, strict=True)]
    home = {token: middle for middles in tops for token, middle in middles.items()}
    for token, middle in home.items():
        drawing.text(middle, 100, " ".join(f"e{expert}" for expert in ids[token]), "note middle")
    for rank, left in enumerate(lefts):
        arrived = boxes(160, ARRIVED[rank], left)
        for token, middle in arrived.items():
            drawing.arrow(home[token], 106, middle, 158, f"t{token}", down=True)
        width = span / len(LOCAL_ROW_TO_TOKEN[rank])
        for row, token in enumerate(LOCAL_ROW_TO_TOKEN[rank]):
            middle = left + (row + 0.5) * width
            drawing.arrow(arrived[token], 188, middle, 262, f"t{token}", down=True)
            drawing.box(middle - width / 2 + 2, 264, width - 4, 28, f"t{token}", f"t{token}")
        for expert, first, count in segments(LOCAL_ROW_TO_EXPERT[rank]):
            drawing.box(left + first * width + 2, 316, count * width - 4, 28, f"expert {expert}")
            for row in range(first, first + count):
                token = LOCAL_ROW_TO_TOKEN[rank][row]
                x = left + (row + 0.5) * width
                drawing.arrow(x, 292, x, 314, f"t{token}", down=True)
                to = next(middles[token] for middles in ends if token in middles)
                drawing.arrow(x, 344, to, 432, f"t{token}", down=True)
    drawing.text(14, 492, 'combine="exact": one row for each expert, as here;', "note")
    drawing.text(14, 510, '"reduced": one weighted sum from each rank.', "note")
    return drawing


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "tokens_slots_rows": tokens_slots_rows,
    "padding_and_buffer": padding_and_buffer,
    "plan_maps": plan_maps,
    "mask_maps": mask_maps,
    "expert_parallelism": expert_parallelism,
}


def write(folder: Path) -> None:
    """Write all drawings.

    Args:
        folder: target folder, created if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the drawings")
    write(parser.parse_args().out)
