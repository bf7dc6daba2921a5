"""`turnout tune`: a better composition for a workload and a goal, by the steps that tuning guides teach, with the evidence."""
