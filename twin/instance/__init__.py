"""Digital twin of one instance: its loop, clock, requests and metrics."""
