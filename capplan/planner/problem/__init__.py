"""The planning problem: instances, their settings, and how they are estimated and evaluated."""
