"""Validation of plans on running servers, under the requests that the twin simulates."""
