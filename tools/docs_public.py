# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""An extension of the API reference (mkdocs.yml): methods that Paddle or Python calls are not listed as public."""

from __future__ import annotations

from typing import Any

import griffe

CALLED_BY_OTHERS = ("extra_repr", "draw_those_of", "weighted_rows")


class PublicMethods(griffe.Extension):
    """Hides special methods, and those of layers that only this package and Paddle call."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Remove the methods of a class, since an alias of it would list them whatever they are marked as."""
        for name in list(cls.members):
            if name in CALLED_BY_OTHERS or (name.startswith("__") and name != "__init__"):
                del cls.members[name]
