"""Which Stoker this is."""

VERSION = "0.1.0"
