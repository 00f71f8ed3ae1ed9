"""Search a space of configurations: one engine, its worker processes, and the journal that a sweep resumes from."""
