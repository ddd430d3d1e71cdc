"""A dataset as a folder, by FUSE."""
