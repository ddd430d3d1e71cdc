"""A folder for PYTHONPATH: with it `import horovod` finds Stoker's."""
