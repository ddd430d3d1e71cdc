"""A kernel, a source and the shell of a daemon for tests of the mount's core: all in memory, all in seeded order."""
