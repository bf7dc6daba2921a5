"""One rule for what a list of patterns means, wherever a quantizer takes one."""

from __future__ import annotations

from grids import every

from turnout.plugins.quant.names import is_head, listed

Q = "model.layers.3.self_attn.q_proj"


@every("pattern", ["q_proj", "self_attn", "self_attn.q_proj", "layers.3", "model.layers.3", "model", Q, "*_proj", "layers.?", "re:.*q_proj",
     "re:model.layers.[0-4].", "layers.*.self_attn"])  # fmt: skip
def test_a_pattern_means_a_run_of_whole_parts(pattern: str) -> None:
    """vllm PR#44628: short patterns never matched, and layers left in floats were read as quantized."""
    assert listed(Q, ["lm_head", pattern]) == pattern


@every("pattern", ["q", "proj", "layers.30", "layers.1", "layers.q_proj", "k_proj", "model.q_proj", "re:q_proj", f"{Q}.more", "", "attn.q_proj"])  # fmt: skip
def test_a_part_of_a_part_is_no_match(pattern: str) -> None:
    assert listed(Q, [pattern]) is None
    assert listed("model.layers.30.self_attn.q_proj", ["layers.3"]) is None


def test_the_head_is_what_stands_outside_the_numbered_layers() -> None:
    assert is_head("lm_head") and is_head("embed_out") and is_head("model.decoder.project_out")
    assert not is_head(Q) and not is_head("transformer.h.0.attn.c_attn")
