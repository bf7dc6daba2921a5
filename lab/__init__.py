"""The laboratory: compares, measures, simulates, replays, tunes and quantizes. Nothing else imports it."""

from turnout.lab.equivalence import assert_equivalent, open_engine

__all__ = ["assert_equivalent", "open_engine"]
