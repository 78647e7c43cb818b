"""A store that notices what it lacks, and learns it."""
