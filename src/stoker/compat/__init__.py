"""Interfaces of other systems on Stoker: scripts written for them run here. Nothing else in Stoker needs this."""
