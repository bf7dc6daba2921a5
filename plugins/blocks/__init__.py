"""Block managers."""

from turnout.core import BlockManager, Register, hookimpl
from turnout.plugins.blocks.paged import PagedBlocks
from turnout.plugins.blocks.radix import RadixBlocks


@hookimpl
def register_block_managers(register: Register[BlockManager]) -> None:
    register("paged", PagedBlocks)
    register("radix", RadixBlocks)
