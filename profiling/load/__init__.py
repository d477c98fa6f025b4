"""Load on a server from outside: requests of a workload, sent when they are due, and what came back when."""
