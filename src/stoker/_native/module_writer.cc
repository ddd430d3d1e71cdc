// What Python sees of the writer.
#include <map>
#include <memory>

#include "module.h"
#include "writer.h"

namespace {

// Holds on to what is being written: with it Python need not.
class Writes {
 public:
  // The GIL is kept: bytes may be given back meanwhile.
  void write(uint64_t number, int fd, uint64_t offset, const py::buffer& data) {
    auto held = std::make_unique<py::buffer_info>(data.request());
    if (held->itemsize != 1 || held->ndim != 1 || (held->size && held->strides[0] != 1))
      throw py::value_error("only bytes that lie one after the other can be written");
    const auto* bytes = static_cast<const char*>(held->ptr);
    const auto size = static_cast<uint64_t>(held->size);
    if (!held_.emplace(number, std::move(held)).second) throw py::value_error("this number is being written");
    writer_.write({number, fd, offset, bytes, size});
  }

  py::list take() {
    py::list taken;
    for (const Writer::Done& done : writer_.take()) {
      held_.erase(done.number);
      taken.append(py::make_tuple(done.number, done.crc, done.error));
    }
    return taken;
  }

  int event_fd() const { return writer_.event_fd(); }

 private:
  std::map<uint64_t, std::unique_ptr<py::buffer_info>> held_;
  Writer writer_;  // ends before what it writes is let go of
};

}  // namespace

void bind_writer(py::module_& module) {
  py::class_<Writes>(module, "Writer")
      .def(py::init<>())
      .def("write", &Writes::write, py::arg("number"), py::arg("fd"), py::arg("offset"), py::arg("data"))
      .def("take", &Writes::take)
      .def("fileno", &Writes::event_fd);
}
