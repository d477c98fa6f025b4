"""Server measurements: closed loops at many operating points, adapter loads, first tokens."""
