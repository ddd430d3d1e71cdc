"""FOLDER COUNT WHAT: microseconds for each of the files 0, 1, … to be read, opened or looked at, the second time; or
seconds that `ls -lR` takes, which must find COUNT files."""

import os
import subprocess
import sys
import time

READ_BYTES = 128 * 1024


def read(path, buffer):
    fd = os.open(path, os.O_RDONLY)
    os.readv(fd, [buffer])
    os.close(fd)


def read_by_python(path, _):
    """As most programs do it: it asks whether the file is a terminal as well."""
    with open(path, "rb") as file:
        file.read()


def just_open(path, _):
    os.close(os.open(path, os.O_RDONLY))


def look(path, _):
    os.stat(path)


def once(do, paths, buffer):
    began = time.perf_counter()
    for path in paths:
        do(path, buffer)
    return time.perf_counter() - began


def main():
    folder, count, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if what == "list":
        began = time.perf_counter()
        said = subprocess.run(["ls", "-lR", folder], stdout=subprocess.PIPE, check=True).stdout
        spent_s = time.perf_counter() - began
        found = said.count(b"\n-")
        assert found == count, f"{found} files were listed, not {count}"
        print(spent_s)
        return
    paths = [f"{folder}/{number}" for number in range(count)]
    buffer = bytearray(READ_BYTES)
    do = {"read": read, "python": read_by_python, "open": just_open, "stat": look}[what]
    once(do, paths, buffer)
    print(once(do, paths, buffer) / count * 1e6)


main()
