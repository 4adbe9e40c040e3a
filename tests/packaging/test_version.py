# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""One version everywhere: package, installed metadata, change log."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import paddle_moe_ops
from paddle_moe_ops import _build_check

ROOT = Path(__file__).resolve().parents[2]


def test_package_and_installed_metadata_agree():
    version, _, local = metadata.version("paddle-moe-ops").partition("+")
    built = _build_check.build_info()
    minor = "".join(built["paddle_version"].split(".")[:2])
    assert version == paddle_moe_ops.__version__
    assert re.fullmatch(rf"paddle{minor}\.{r'cu[0-9]+' if built['cuda'] else 'cpu'}", local)


def test_newest_entry_of_the_change_log_is_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)[0] == paddle_moe_ops.__version__


def test_no_paddle_distribution_is_required_by_name():
    required = metadata.requires("paddle-moe-ops")
    always = sorted(re.split(r"[^\w-]", name)[0] for name in required if "extra ==" not in name)
    assert always == ["ml_dtypes", "numpy"]
    extras = {match[1] for name in required if (match := re.search(r"extra == [\"'](\w+)", name))}
    assert extras == {"triton", "dev"}
