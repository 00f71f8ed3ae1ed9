"""Time a kernel beside its peers, check it against float64, and read the profiler's counters."""
