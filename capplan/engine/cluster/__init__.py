"""A plan that runs: its groups as engine processes, and one router in front that follows the shares."""
