"""Stoker under the names of other libraries: nothing else in Stoker needs this."""
