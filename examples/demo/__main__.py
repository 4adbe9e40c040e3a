# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m examples.demo``, from the root of a checkout."""

import sys

from . import main

sys.exit(main())
