// What Python sees of the front. Nothing here is called by the front's own threads.
#include "module.h"

#include "front.h"

namespace {

// An id, the secret, the buckets that it opens, and the access key that it signs for.
using TokenOf = std::tuple<int, std::string, std::optional<std::vector<std::string>>, std::string>;
using BucketOf = std::tuple<uint16_t, double, uint32_t>;  // its number, its ttl, and `not_before_s`

BucketRule rule_of(const BucketOf& bucket) {
  return {std::get<0>(bucket), std::get<1>(bucket), std::get<2>(bucket)};
}

using WantedOf = std::tuple<uint64_t, uint64_t, std::string>;  // `from_bytes`, `count_max` and `held`

Wanted wanted_of(const WantedOf& wanted) { return {std::get<0>(wanted), std::get<1>(wanted), std::get<2>(wanted)}; }

py::object asked_of(Event& event) {
  Asked& asked = event.asked;
  py::dict headers;
  for (const auto& [name, value] : asked.headers) {
    const py::bytes which(name);
    // One that is there twice is a list (RFC 9110, 5.3).
    if (headers.contains(which)) headers[which] = py::bytes(std::string(py::bytes(headers[which])) + "," + value);
    else headers[which] = py::bytes(value);
  }
  return py::make_tuple(py::str(py::reinterpret_steal<py::object>(
                            PyUnicode_DecodeLatin1(asked.method.data(), static_cast<Py_ssize_t>(asked.method.size()), nullptr))),
                        py::bytes(asked.target), std::move(headers), py::bytes(asked.body), asked.principal,
                        asked.is_near, asked.body_bytes);
}

py::list take(Front& front, size_t limit) {
  std::vector<Event> events = front.take(limit);
  py::list taken;
  for (Event& event : events) {
    const char* kind = "asked";
    if (event.kind == Event::Kind::gone) kind = "gone";
    if (event.kind == Event::Kind::drained) kind = "drained";
    if (event.kind == Event::Kind::broken) kind = "broken";
    py::object asked = py::none(), part = py::none();
    if (event.kind == Event::Kind::asked) asked = asked_of(event);
    if (event.kind == Event::Kind::body) {
      kind = "body";
      part = py::make_tuple(py::bytes(event.bytes), event.is_last);
    }
    taken.append(py::make_tuple(kind, event.connection, std::move(asked), std::move(part)));
  }
  return taken;
}

void set_rules(Front& front, const std::vector<TokenOf>& tokens, const std::map<std::string, BucketOf>& buckets) {
  auto rules = std::make_shared<Rules>();
  for (const auto& [id, secret, names, access_key] : tokens) {
    Token token{id, secret, access_key, !names, {}};
    if (names) token.buckets.insert(names->begin(), names->end());
    if (!access_key.empty()) rules->keys[access_key] = static_cast<int>(rules->tokens.size());
    rules->tokens.push_back(std::move(token));
  }
  for (const auto& [name, bucket] : buckets) rules->buckets[name] = rule_of(bucket);
  front.set_rules(std::move(rules));
}

bool send_file(Front& front, Files& files, uint64_t connection, uint32_t container, uint64_t offset, uint64_t size,
               const std::string& before) {
  int number = 0;
  std::shared_ptr<File> file = files.open(container, number);
  if (!file) return false;
  if (!before.empty()) front.say(connection, before, false);
  return front.send_file(connection, std::move(file), offset, size);
}

// Memory of an inflow that stays as it is while Python looks at it.
struct InflowBytes {
  std::shared_ptr<char[]> bytes;
  uint64_t size;
};

std::string_view view_of(const py::buffer_info& view) {
  if (view.itemsize != 1 || view.ndim != 1 || (view.size && view.strides[0] != 1))
    throw py::value_error("only bytes that lie one after the other can be said");
  return {static_cast<const char*>(view.ptr), static_cast<size_t>(view.size)};
}

void bind_inflow(py::module_& module) {
  py::class_<InflowBytes>(module, "InflowBytes", py::buffer_protocol()).def_buffer([](InflowBytes& it) {
    return py::buffer_info(reinterpret_cast<const uint8_t*>(it.bytes.get()), static_cast<py::ssize_t>(it.size));
  });
  py::class_<Inflow, std::shared_ptr<Inflow>>(module, "Inflow")
      .def(py::init<uint64_t>(), py::arg("size_bytes"))
      .def_property_readonly("size_bytes", &Inflow::size)
      .def_property_readonly("filled", &Inflow::filled)
      .def_property_readonly("is_kept", [](const Inflow& inflow) { return inflow.view().file != nullptr; })
      .def("view",
           [](const Inflow& inflow) {
             Inflow::View view = inflow.view();
             return InflowBytes{view.bytes, view.bytes ? view.filled : 0};
           })
      .def(
          "take",
          [](Inflow& inflow, const py::buffer& part) {
            const py::buffer_info info = part.request();
            const std::string_view bytes = view_of(info);
            return inflow.take(bytes.data(), bytes.size());
          },
          py::arg("part"))
      .def(
          "keep",
          [](Inflow& inflow, Files& files, uint32_t container, uint64_t offset) {
            int number = 0;
            std::shared_ptr<File> file = files.open(container, number);
            if (!file) return false;
            inflow.keep(std::move(file), offset);
            return true;
          },
          py::arg("files"), py::arg("container"), py::arg("offset"));
}

}  // namespace

void bind_front(py::module_& module) {
  bind_inflow(module);
  py::class_<Files, std::shared_ptr<Files>>(module, "Files")
      .def(py::init<std::string, size_t>(), py::arg("folder"), py::arg("open_max"))
      .def("path", &Files::path, py::arg("container"))
      .def("is_used", &Files::is_used, py::arg("container"), release())
      .def("forget", &Files::forget, py::arg("container"), py::arg("size_bytes"), release())
      .def("leaving_bytes", &Files::leaving_bytes);
  py::class_<FrontSettings>(module, "FrontSettings")
      .def(py::init<>())
      .def_readwrite("connections_max", &FrontSettings::connections_max)
      .def_readwrite("head_bytes_max", &FrontSettings::head_bytes_max)
      .def_readwrite("body_bytes_max", &FrontSettings::body_bytes_max)
      .def_readwrite("head_s", &FrontSettings::head_s)
      .def_readwrite("body_s", &FrontSettings::body_s)
      .def_readwrite("idle_s", &FrontSettings::idle_s)
      .def_readwrite("send_s", &FrontSettings::send_s)
      .def_readwrite("egress_bytes_per_s", &FrontSettings::egress_bytes_per_s)
      .def_readwrite("connection_bytes_per_s", &FrontSettings::connection_bytes_per_s)
      .def_readwrite("passing_max", &FrontSettings::passing_max)
      .def_readwrite("domains", &FrontSettings::domains)
      .def_readwrite("threads", &FrontSettings::threads);
  py::class_<Figures>(module, "Figures")
      .def_readonly("accepted", &Figures::accepted)
      .def_readonly("refused", &Figures::refused)
      .def_readonly("requests", &Figures::requests)
      .def_readonly("handed_over", &Figures::handed_over)
      .def_readonly("sent_bytes", &Figures::sent_bytes)
      .def_readonly("timed_out", &Figures::timed_out)
      .def_readonly("connections", &Figures::connections);
  py::class_<Front, std::shared_ptr<Front>>(module, "Front")
      .def(py::init<std::shared_ptr<Index>, std::shared_ptr<Files>, const FrontSettings&>(), py::arg("index"),
           py::arg("files"), py::arg("settings"))
      .def("listen", &Front::listen, py::arg("fd"))
      .def("start", &Front::start, release())
      .def("drain", &Front::drain, release())
      .def("stop", &Front::stop, release())
      .def("set_rules", &set_rules, py::arg("tokens"), py::arg("buckets"))
      .def("set_now", &Front::set_now, py::arg("now_s"))
      .def("fileno", &Front::event_fd)
      .def("take", &take, py::arg("limit"))
      .def(
          "say",
          [](Front& front, uint64_t connection, const py::buffer& bytes, bool is_data) {
            const py::buffer_info info = bytes.request();
            return front.say(connection, std::string(view_of(info)), is_data);
          },
          py::arg("connection"), py::arg("bytes"), py::arg("is_data") = false)
      .def("send_file", &send_file, py::arg("files"), py::arg("connection"), py::arg("container"), py::arg("offset"),
           py::arg("size"), py::arg("before") = "", release())
      .def("send_inflow", &Front::send_inflow, py::arg("connection"), py::arg("inflow"), py::arg("offset"),
           py::arg("size"))
      .def(
          "answer_batch",
          [](Front& front, uint64_t connection, std::vector<std::string> keys, const BucketOf& bucket,
             const std::optional<WantedOf>& wanted, std::optional<std::string> ranges, std::vector<std::string> versions)
              -> std::optional<std::tuple<uint64_t, uint64_t, std::vector<uint32_t>>> {
            const Reads reads{std::move(keys), std::move(ranges), std::move(versions)};
            Batch batch;
            {
              const py::gil_scoped_release unlocked;
              batch = front.answer_batch(connection, reads, rule_of(bucket), wanted ? wanted_of(*wanted) : Wanted{});
            }
            if (!batch.is_answered) return std::nullopt;
            return std::tuple(batch.size_bytes, batch.places, std::move(batch.large));
          },
          py::arg("connection"), py::arg("keys"), py::arg("bucket"), py::arg("wanted") = py::none(),
          py::arg("ranges") = py::none(), py::arg("versions") = std::vector<std::string>())
      .def("pass_descriptor", &Front::pass, py::arg("connection"), py::arg("bucket"), py::arg("container"), py::arg("before") = "",
           py::arg("after") = "", release())
      .def_property_readonly("instance", [](const Front& front) { return py::bytes(front.instance()); })
      .def("more", &Front::more, py::arg("connection"), py::arg("size_bytes"))
      .def("finish", &Front::finish, py::arg("connection"))
      .def("drop", &Front::drop, py::arg("connection"))
      .def("notify", &Front::notify, py::arg("connection"), py::arg("unsent_bytes_max"))
      .def("figures", &Front::figures)
      .def("take_hits", [](Front& front) {
        std::map<uint16_t, std::pair<uint64_t, uint64_t>> hits;
        for (const auto& [bucket, figures] : front.take_hits()) hits[bucket] = {figures.hits, figures.hit_bytes};
        return hits;
      });
}
