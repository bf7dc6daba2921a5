"""What is left for the cache: what others hold, the largest step and the limits around the process are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from turnout.core import ModelInfo
from turnout.core.model import Limits
from turnout.plugins.runner import memory

MIB = 1 << 20
GPU = ModelInfo("", "", (), 128, 64, torch.float32, torch.device("cuda"), 0)
NOBODY: Any = None


@pytest.mark.parametrize(("replays", "left"), [(False, 60 - 20 - 10), (True, 60 - 20 - 10 - 3)])
def test_on_a_gpu_the_largest_step_other_processes_and_the_share_are_left_out(
    monkeypatch: Any, replays: bool, left: int
) -> None:
    """And where decode steps are recorded, the largest of these, whose memory is never given back."""
    asked = []

    def largest(info: ModelInfo, model: Any, num_tokens: int, num_seqs: int) -> int:
        asked.append((num_tokens, num_seqs))
        return {512: 10, 32: 3}[num_tokens] * MIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * MIB, 100 * MIB))
    monkeypatch.setattr(memory, "largest", largest)
    limits = Limits(max_num_batched_tokens=512, max_num_seqs=32, gpu_memory_utilization=0.8)
    assert memory.room(GPU, limits, NOBODY, replays)[0] == left * MIB
    assert asked == [(512, 32), (32, 32)][: 1 + replays]
