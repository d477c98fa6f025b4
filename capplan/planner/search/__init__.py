"""Local search of the solver `capplan`."""
