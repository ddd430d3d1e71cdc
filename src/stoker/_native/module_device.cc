// What Python sees of the requests of a mount.
#include "device.h"
#include "module.h"

namespace {

size_t read_request(int device, const py::buffer& buffer, const std::string& attributes, const PlainFiles& plain) {
  const py::buffer_info held = buffer.request(true);
  if (held.itemsize != 1 || held.ndim != 1 || (held.size && held.strides[0] != 1))
    throw py::value_error("requests are read into bytes that lie one after the other");
  ssize_t got;
  {
    const py::gil_scoped_release unlocked;
    got = next_request(device, static_cast<char*>(held.ptr), static_cast<size_t>(held.size), attributes, plain);
  }
  if (got >= 0) return static_cast<size_t>(got);
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

}  // namespace

void bind_device(py::module_& module) {
  py::class_<PlainFiles>(module, "PlainFiles")
      .def(py::init<>())
      .def("add", &PlainFiles::add, py::arg("node"))
      .def("discard", &PlainFiles::discard, py::arg("node"))
      .def("__contains__", &PlainFiles::has, py::arg("node"));
  module.def("read_request", &read_request, py::arg("device"), py::arg("buffer"), py::arg("attributes"), py::arg("plain"));
}
