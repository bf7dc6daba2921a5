"""A .gguf file's tensors, written as safetensors under transformers' names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.plugins.formats.gguf.config import ROPE_TENSORS
from turnout.plugins.formats.gguf.reader import Reader

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 << 30  # one shard at a time is in memory


def write_weights(file: Reader, model: Any, folder: Path, progress: Callable[[str], None]) -> torch.dtype:
    """Write every tensor as safetensors, in shards. Returns the dtype all matrices have, float32 if they differ."""
    import torch
    from safetensors.torch import save_file

    shapes, names = _parameters(model, file)
    keys = [key for key in file.tensors if key not in ROPE_TENSORS]
    if unknown := set(keys) - names.keys():
        raise ValueError(f"it holds tensors the model has no place for: {_some(unknown)}")
    if missing := {name for key, name in names.items() if key not in file.tensors}:
        raise ValueError(f"it lacks tensors the model needs: {_some(missing)}")
    groups = _shards(file, keys)
    weight_map: dict[str, str] = {}
    dtypes: set[torch.dtype] = set()
    for number, group in enumerate(groups, start=1):
        shard: dict[str, torch.Tensor] = {}
        for key in group:
            for name, tensor in _weights(file, key, names[key]):
                if tuple(tensor.shape) != shapes[name]:
                    given = f"{key} has shape {tuple(tensor.shape)}"
                    raise ValueError(f"{given}, the model needs {shapes[name]}")
                shard[name] = tensor
        dtypes |= {tensor.dtype for tensor in shard.values() if tensor.ndim > 1}
        target = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors"
        save_file(shard, folder / target, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, target)
        progress(f"converted {file.path.name}: part {number} of {len(groups)}")
    if len(groups) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _shards(file: Reader, keys: Sequence[str]) -> list[list[str]]:
    """The keys in groups of about SHARD_BYTES as float32, so that one group at a time is in memory."""
    groups: list[list[str]] = [[]]
    room = SHARD_BYTES
    for key in keys:
        size = 4 * int(file.tensors[key].n_elements)
        if groups[-1] and size > room:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(key)
        room -= size
    return groups


def _parameters(model: Any, file: Reader) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shape of every parameter by name, and its name by the file's; an expert's number is `*` in the latter."""
    import gguf

    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == file.arch)
    table = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    shapes: dict[str, tuple[int, ...]] = {}
    names: dict[str, str] = {}
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        if ".experts." in name:  # transformers stacks them in memory, a checkpoint names each
            prefix, _, part = name.rpartition(".")
            rows = tensor.shape[1] // 2 if part == "gate_up_proj" else tensor.shape[1]
            for projection in ("gate", "up") if part == "gate_up_proj" else ("down",):
                each = f"{prefix}.*.{projection}_proj.weight"
                names[f"blk.{name.split('.')[2]}.ffn_{projection}_exps.weight"] = each
                shapes |= {each.replace("*", str(n)): (rows, tensor.shape[2]) for n in range(tensor.shape[0])}
            continue
        base, _, suffix = name.rpartition(".")
        key = table.get_name(base)
        if key is None:
            raise ValueError(f"the GGUF format has no name for {name}; the model can't be served")
        names[f"{key}.{suffix}"] = name
        shapes[name] = tuple(tensor.shape)
    return shapes, names


def _weights(file: Reader, key: str, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters one tensor of the file becomes, with the changes of the GGUF format undone."""
    import gguf
    import torch

    values = halves_apart(file, key, torch.from_numpy(file.array(key).copy()))
    if file.arch in ("gemma2", "gemma3") and key.endswith("norm.weight"):
        values -= 1.0
    elif file.arch == "gpt2" and key.startswith("blk.") and values.ndim == 2:  # Conv1D keeps [in, out]
        values = values.T
    kinds = {gguf.GGMLQuantizationType.F16: torch.float16, gguf.GGMLQuantizationType.BF16: torch.bfloat16}
    values = values.to(kinds.get(file.tensors[key].tensor_type, torch.float32)).contiguous()
    if "*" in name:
        yield from ((name.replace("*", str(number)), part) for number, part in enumerate(values))
    else:
        yield name, values


def halves_apart(file: Reader, key: str, values: torch.Tensor) -> torch.Tensor:
    """The rows of a tensor of the file, packed or not, in transformers' order. Llama's queries and keys are rotated in
    pairs of neighbours there, in pairs half a head apart here."""
    if file.arch != "llama" or key.split(".")[-2] not in ("attn_q", "attn_k"):
        return values
    heads = file.own("attention.head_count")
    heads = file.own("attention.head_count_kv", heads) if ".attn_k." in key else heads
    return values.reshape(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")
