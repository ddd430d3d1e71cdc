// What Python sees of files as memory, and of memory that is lent.
#include <sys/mman.h>
#include <unistd.h>

#include "module.h"

namespace {

// The beginning of a file, for reading. It may be longer than the file: who looks behind the end is killed (SIGBUS).
class Mapping {
 public:
  Mapping(int fd, size_t size) : size_(size), bytes_(::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0)) {
    if (bytes_ != MAP_FAILED) return;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  Mapping(const Mapping&) = delete;
  ~Mapping() { ::munmap(bytes_, size_); }

  py::buffer_info buffer() const {
    return py::buffer_info(static_cast<const uint8_t*>(bytes_), static_cast<py::ssize_t>(size_));
  }

 private:
  const size_t size_;
  void* const bytes_;
};

py::buffer_info bytes_of(const py::buffer& buffer) {
  py::buffer_info held = buffer.request(true);
  if (held.itemsize != 1 || held.ndim != 1 || (held.size && held.strides[0] != 1))
    throw py::value_error("only bytes that lie one after the other can be lent or marked");
  return held;
}

// Memory that is lent until nobody sees it any more: then a byte elsewhere is 0. No Python is run for that: a signal's
// handler would run in the middle of it, and what it raises (a Ctrl-C) be lost. A forked copy that goes marks nothing.
class Lent {
 public:
  Lent(const py::buffer& memory, size_t size, const py::buffer& marks, size_t mark)
      : memory_(bytes_of(memory)), marks_(bytes_of(marks)), size_(size), mark_(mark), owner_(::getpid()) {
    if (size > static_cast<size_t>(memory_.size) || mark >= static_cast<size_t>(marks_.size))
      throw py::value_error("this is beyond the memory, or its mark beyond the marks");
  }
  Lent(const Lent&) = delete;
  ~Lent() {
    if (::getpid() == owner_) static_cast<uint8_t*>(marks_.ptr)[mark_] = 0;
  }

  py::buffer_info buffer() const {
    return py::buffer_info(static_cast<uint8_t*>(memory_.ptr), static_cast<py::ssize_t>(size_));
  }

 private:
  const py::buffer_info memory_, marks_;
  const size_t size_, mark_;
  const pid_t owner_;
};

}  // namespace

void bind_mapping(py::module_& module) {
  py::class_<Mapping>(module, "Mapping", py::buffer_protocol())
      .def(py::init<int, size_t>(), py::arg("fd"), py::arg("size_bytes"))
      .def_buffer([](Mapping& mapping) { return mapping.buffer(); });
  py::class_<Lent>(module, "Lent", py::buffer_protocol())
      .def(py::init<const py::buffer&, size_t, const py::buffer&, size_t>(), py::arg("memory"), py::arg("size_bytes"),
           py::arg("marks"), py::arg("mark"))
      .def_buffer([](Lent& lent) { return lent.buffer(); });
}
