"""One page from the results of runs. Imports nothing that computes."""
