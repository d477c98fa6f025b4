"""Training of surrogates on simulations of the digital twin."""
