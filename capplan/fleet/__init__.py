"""Router over the engine instances of a plan."""
