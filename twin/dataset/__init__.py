"""Scenarios of one GPU and what the twin makes of them: the training data of surrogates."""
