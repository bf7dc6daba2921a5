"""Workloads: arrivals, lengths and recorded traces, for the simulator, the benchmarks and the tuner."""
