"""HTML pages of results, one module per kind of result, and the figures on them."""
