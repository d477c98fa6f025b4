"""Tables of results and the words beside them, for the terminal and for pages."""
