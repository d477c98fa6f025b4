"""The plan document, assembled from a verified placement."""
