"""Computes until it is killed."""

while True:
    sum(range(100_000))
