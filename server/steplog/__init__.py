"""What an engine did and why: recordings, their replay, the accounts of every request's time, traces to look at."""
