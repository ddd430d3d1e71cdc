"""The `stoker` command. What does not belong here: anything that a library user would want to call."""
