# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Start-up module of Python. In a process that a recorded test starts, it records lines (pytest_reach)."""

import os
import sys

if "MUTANTS_CHILDREN" in os.environ:
    sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from reach import Tracer

    Tracer(os.environ["MUTANTS_CHILDREN"]).start()
