"""One torch thread, as in every engine, and property tests that try the same examples every time."""

from __future__ import annotations

import hypothesis
import torch

torch.set_num_threads(1)

# A busy machine is no failure, and a red run must be red again on the next machine.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("steady")
