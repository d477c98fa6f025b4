"""A server measured from outside: closed loops at many operating points, adapter loads, idle answers."""
