"""Stoker under the names of other libraries."""
