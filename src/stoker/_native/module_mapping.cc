// What Python sees of files as memory.
#include <sys/mman.h>

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

}  // namespace

void bind_mapping(py::module_& module) {
  py::class_<Mapping>(module, "Mapping", py::buffer_protocol())
      .def(py::init<int, size_t>(), py::arg("fd"), py::arg("size_bytes"))
      .def_buffer([](Mapping& mapping) { return mapping.buffer(); });
}
