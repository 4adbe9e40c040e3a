# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""The build backend: setuptools. If it is missing, as in a new environment of Python 3.12, one line reports it."""

try:
    from setuptools.build_meta import *  # noqa: F403
except ImportError:
    raise SystemExit('paddle_moe_ops: setuptools is missing; run: pip install "setuptools>=77"') from None
