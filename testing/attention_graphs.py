"""A decode step planned once and brought up to date in place, as a captured one is. It knows no runner."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from turnout.core.interfaces import AttentionBackend
from turnout.core.optional import RefreshingPlans
from turnout.testing.attention_scene import AttentionCase, Part, Scene, batch_of

FIRST, SECOND = (5, 17, 40), (39, 6, 32)  # keys of the requests in a step, and in the one that takes its place


def replayed(backend: AttentionBackend[Any, Any], case: AttentionCase) -> tuple[Scene, Tensor, list[Part]]:
    """What the second step is answered from the first one's plan, tensors and, on a GPU, captured launches."""
    assert isinstance(backend, RefreshingPlans), "it claims graphs, and has no method refresh(plan, batch, layer, size)"
    scene = Scene(backend, replace(case, lens=tuple((1, keys) for keys in (*FIRST, *SECOND))))
    size, parts = case.block_size, scene.last
    first, second = parts[: len(FIRST)], parts[len(FIRST) :]
    scene.store_earlier()
    width = -(-max(*FIRST, *SECOND) // size)
    batch, inputs = batch_of(first, size, scene.device, width), scene.inputs(first)
    plan = backend.plan(batch, scene.layer, size)
    backend.refresh(plan, batch, scene.layer, size)  # once before it is recorded, too
    backend.run(*inputs, scene.cache, plan, scene.sinks)
    graph = torch.cuda.CUDAGraph() if scene.device.type == "cuda" else None
    if graph is not None:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = backend.run(*inputs, scene.cache, plan, scene.sinks)
    later = batch_of(second, size, scene.device, width)
    for spec in fields(later):
        if isinstance(tensor := getattr(batch, spec.name), Tensor):
            tensor.copy_(getattr(later, spec.name))
    for tensor, new in zip(inputs, scene.inputs(second), strict=True):
        tensor.copy_(new)
    now = replace(batch, query_lens_host=later.query_lens_host, kv_lens_host=later.kv_lens_host)
    backend.refresh(plan, now, scene.layer, size)
    if graph is None:
        out = backend.run(*inputs, scene.cache, plan, scene.sinks)
    else:
        graph.replay()
    return scene, out.clone(), second
