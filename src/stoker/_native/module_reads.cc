// What Python sees of coming reads.
#include <cstring>

#include "module.h"
#include "reads.h"

namespace {

using Readers = std::vector<std::shared_ptr<const Reads>>;
using Positions = std::vector<int64_t>;

// Eight bytes each, one after the other.
const void* numbers_of(const py::buffer_info& info) {
  if (info.ndim != 1 || info.itemsize != 8 || (info.size && info.strides[0] != 8))
    throw py::value_error("numbers are eight bytes each, one after the other");
  return info.ptr;
}

void check(const Readers& readers, const Positions& from, const Positions& until) {
  if (readers.size() != from.size() || readers.size() != until.size())
    throw py::value_error("each reader is looked at from somewhere, and up to somewhere");
}

std::shared_ptr<const Reads> with(const Reads& reads, const py::buffer& items, const py::buffer& positions,
                                  int64_t start, int64_t stop) {
  const py::buffer_info item_info = items.request(), position_info = positions.request();
  const auto* item = static_cast<const uint64_t*>(numbers_of(item_info));
  const auto* position = static_cast<const int64_t*>(numbers_of(position_info));
  if (item_info.size != position_info.size) throw py::value_error("each item is at a position");
  const auto count = static_cast<size_t>(item_info.size);
  const py::gil_scoped_release unlocked;
  std::vector<Read> added(count);
  for (size_t i = 0; i < count; ++i) added[i] = {item[i], position[i]};
  return reads.with(std::move(added), start, stop);
}

py::bytes next_reads_of_all(const Readers& readers, const Positions& from, const Positions& until,
                            const py::buffer& items, bool with_again) {
  check(readers, from, until);
  const py::buffer_info info = items.request();
  const auto* item = static_cast<const uint64_t*>(numbers_of(info));
  std::vector<NextRead> found;
  {
    const py::gil_scoped_release unlocked;
    found = next_reads(readers, from, until, item, static_cast<size_t>(info.size), with_again);
  }
  return {reinterpret_cast<const char*>(found.data()), found.size() * sizeof(NextRead)};
}

// Of a few items, without a detour over bytes.
std::vector<std::tuple<uint32_t, uint32_t, int64_t, int64_t>> next_reads_of(const Readers& readers,
                                                                            const Positions& from,
                                                                            const Positions& until,
                                                                            const std::vector<uint64_t>& items) {
  check(readers, from, until);
  std::vector<std::tuple<uint32_t, uint32_t, int64_t, int64_t>> found;
  for (const NextRead& read : next_reads(readers, from, until, items.data(), items.size(), true))
    found.emplace_back(read.reader, read.item, read.position, read.again);
  return found;
}

}  // namespace

void bind_reads(py::module_& module) {
  py::class_<Reads, std::shared_ptr<Reads>>(module, "Reads")
      .def(py::init<>())
      .def("__len__", &Reads::size)
      .def_property_readonly("positions", &Reads::positions)
      .def("with_reads", &with, py::arg("items"), py::arg("positions"), py::arg("start"), py::arg("stop"))
      .def("until", &Reads::until, py::arg("stop"), py::arg("start"), release())
      .def("since", &Reads::since, py::arg("start"), release());
  module.def("next_reads", &next_reads_of_all, py::arg("readers"), py::arg("starts"), py::arg("stops"), py::arg("items"),
             py::arg("with_again") = false);
  module.def("next_reads_of", &next_reads_of, py::arg("readers"), py::arg("starts"), py::arg("stops"), py::arg("items"));
}
