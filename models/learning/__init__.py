"""Learning from the twin's answers: tables, families of models, their search, small trees, training."""
