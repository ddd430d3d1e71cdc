"""Stands where Horovod's package would: once imported, Stoker's modules are in its place."""

from stoker.compat.horovod.shim import install

install()
