"""Where workers run: a port and its adapters. What does not belong here: when and why they run."""
