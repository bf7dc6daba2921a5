"""Benchmarks measure what a user would see: with a thread for each core."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _a_thread_for_each_core(_one_thread: None) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
