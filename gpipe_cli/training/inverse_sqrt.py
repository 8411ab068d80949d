"""The Transformer's learning rate: linear warm-up, then falling with the root of the step (timm has no such schedule).

Vaswani et al. 2017, section 5.3, in the form that names its peak. The authors' language model (tensorflow/lingvo,
`one_billion_wds.py`, with `TransformerLearningRateSchedule`) warms up over 40,000 steps at a scale of 0.5, which is a
peak of scale / sqrt(width * warm-up) = 5.5e-5 for width 2048.
"""

from __future__ import annotations

import math


def inverse_sqrt_lr(step: int, base_lr: float, warmup_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0: `base_lr` on the last warm-up step, then as 1 / sqrt(step).

    Step s, as the (s + 1)-th, has base_lr * min((s + 1) / W, sqrt(W / (s + 1))) with W = `warmup_steps`, at least 1:
    never above `base_lr`, and the same whatever the number of epochs.
    """
    warmup, number = max(1, warmup_steps), step + 1
    return base_lr * min(number / warmup, math.sqrt(warmup / number))
