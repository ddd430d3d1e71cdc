"""Fakes and conformance suites, as public API: whoever writes an adapter runs the suite of its port.

What does not belong here: anything that production code imports.
"""
