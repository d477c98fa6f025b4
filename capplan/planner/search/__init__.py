"""The shares of our own solver: what moves as one, which fleets to try, where to begin, what to mend."""
