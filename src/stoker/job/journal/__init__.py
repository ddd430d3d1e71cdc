"""Durable state of a job: a port and its adapters. What does not belong here: what the entries mean."""
