"""`turnout simulate`: the real engine, scheduler, block manager and preemption policy under a virtual clock.

Only the runner is another: it asks a latency model how long a step takes and lets that time pass. No model, no weights.
"""
