"""Plans against running servers: the twin's answer and what was measured, under the same requests."""
