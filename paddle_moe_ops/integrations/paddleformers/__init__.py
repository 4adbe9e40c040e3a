# Copyright 2026 The paddle_moe_ops authors
# SPDX-License-Identifier: Apache-2.0
"""Let the Mixture-of-Experts blocks of PaddleFormers' models run on these operators.

::

    import paddle_moe_ops.integrations.paddleformers as pf

    pf.apply("ernie4_5_moe")  # every model of this type
    pf.apply(model)           # this model only

Parameters, their names, constructors and checkpoints stay PaddleFormers' own. Only these calls import
PaddleFormers.
"""

from .api import Supported, applied, apply, remove, supported
from .report import Report

__all__ = ["Report", "Supported", "applied", "apply", "remove", "supported"]
