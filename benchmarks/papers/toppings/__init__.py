"""Toppings (USENIX ATC 2025): its baseline engine, servers by loading policy, routers of a cluster."""
