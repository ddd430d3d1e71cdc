// What Python sees of the front. Nothing here is called by the front's own threads.
#include "module.h"

#include "front.h"

namespace {

// An id, the secret, prefixes of what it may read by bucket, the access key that it signs for, and whose it is.
using TokenOf = std::tuple<int, std::string, std::map<std::string, std::vector<std::string>>, std::string, std::string>;
using NamesOf = std::map<std::string, int>;  // ids of tokens that are certificates, by the names in those
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
                        asked.is_near, asked.body_bytes, py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
                            asked.certificate.data(), static_cast<Py_ssize_t>(asked.certificate.size()), "replace")),
                        asked.peer);
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

void add_tokens(Front& front, Rules& rules, const std::vector<TokenOf>& tokens, const std::map<std::string, double>& tenants,
                const NamesOf& certificates) {
  std::map<int, std::string> names;
  for (const auto& [name, id] : certificates) names[id] = name;
  for (const auto& [id, secret, reads, access_key, tenant] : tokens) {
    Token token{id, secret, access_key, {}, nullptr};
    if (const auto name = names.find(id); name != names.end()) token.certificate = name->second;
    token.reads.insert(reads.begin(), reads.end());
    if (const auto found = tenants.find(tenant); found != tenants.end()) token.tenant = front.tenant(tenant, found->second);
    rules.add(std::move(token));
  }
}

void set_rules(Front& front, const std::vector<TokenOf>& tokens, const std::map<std::string, BucketOf>& buckets,
               const std::map<std::string, double>& tenants, bool is_open, bool asks_back,
               const std::map<std::string, BucketOf>& blobs, const std::optional<NamesOf>& certificates) {
  auto rules = std::make_shared<Rules>();
  rules->is_open = is_open;
  rules->asks_back = asks_back;
  rules->asks_of_certificates = certificates.has_value();
  // Also those for whose tokens the back has still to see that others vouch.
  for (const auto& [name, rate] : tenants) front.tenant(name, rate);
  add_tokens(front, *rules, tokens, tenants, certificates.value_or(NamesOf()));
  for (const auto& [name, bucket] : buckets) rules->buckets[name] = rule_of(bucket);
  for (const auto& [name, bucket] : blobs) rules->blobs[name] = rule_of(bucket);
  front.set_rules(std::move(rules));
}

void change_tokens(Front& front, const std::vector<TokenOf>& added, const std::vector<int>& removed,
                   const std::map<std::string, double>& tenants, const NamesOf& certificates) {
  auto rules = std::make_shared<Rules>(*front.rules());
  if (!removed.empty()) rules->remove({removed.begin(), removed.end()});
  add_tokens(front, *rules, added, tenants, certificates);
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
      .def_readwrite("body_bytes_per_s_min", &FrontSettings::body_bytes_per_s_min)
      .def_readwrite("idle_s", &FrontSettings::idle_s)
      .def_readwrite("send_s", &FrontSettings::send_s)
      .def_readwrite("egress_bytes_per_s", &FrontSettings::egress_bytes_per_s)
      .def_readwrite("connection_bytes_per_s", &FrontSettings::connection_bytes_per_s)
      .def_readwrite("passing_max", &FrontSettings::passing_max)
      .def_readwrite("handed_bytes_max", &FrontSettings::handed_bytes_max)
      .def_readwrite("handing_bytes_max", &FrontSettings::handing_bytes_max)
      .def_readwrite("peer_silence_s", &FrontSettings::peer_silence_s)
      .def_readwrite("domains", &FrontSettings::domains)
      .def_readwrite("open_targets", &FrontSettings::open_targets)
      .def_readwrite("threads", &FrontSettings::threads);
  py::class_<Figures>(module, "Figures")
      .def_readonly("accepted", &Figures::accepted)
      .def_readonly("refused", &Figures::refused)
      .def_readonly("requests", &Figures::requests)
      .def_readonly("handed_over", &Figures::handed_over)
      .def_readonly("sent_bytes", &Figures::sent_bytes)
      .def_readonly("timed_out", &Figures::timed_out)
      .def_readonly("connections", &Figures::connections)
      .def_readonly("waiting", &Figures::waiting);
  py::class_<Tally::Sums>(module, "Tally")
      .def_property_readonly("hits",
                             [](const Tally::Sums& sums) {
                               std::vector<std::tuple<bool, std::string, int, uint64_t>> hits;
                               for (int i = 0; i < 8; ++i)
                                 hits.emplace_back(i >> 2, (i >> 1 & 1) ? "HEAD" : "GET", (i & 1) ? 206 : 200,
                                                   sums.hits[i >> 2][i >> 1 & 1][i & 1]);
                               return hits;
                             })
      .def_property_readonly("refused",
                             [](const Tally::Sums& sums) {
                               std::map<int, uint64_t> refused;
                               for (size_t i = 0; i < sums.refused.size(); ++i)
                                 refused[Tally::REFUSALS[i]] = sums.refused[i];
                               return refused;
                             })
      .def_property_readonly(
          "bounds_s",
          [](const Tally::Sums&) { return std::vector<double>(Tally::BOUNDS_S.begin(), Tally::BOUNDS_S.end()); })
      .def_property_readonly(
          "within", [](const Tally::Sums& sums) { return std::vector<uint64_t>(sums.within.begin(), sums.within.end()); })
      .def_readonly("seconds", &Tally::Sums::seconds)
      .def_property_readonly("handed_on_bounds_s",
                             [](const Tally::Sums&) {
                               return std::vector<double>(Tally::BACK_BOUNDS_S.begin(), Tally::BACK_BOUNDS_S.end());
                             })
      .def_property_readonly("handed_on_within",
                             [](const Tally::Sums& sums) {
                               return std::vector<uint64_t>(sums.handed_on_within.begin(), sums.handed_on_within.end());
                             })
      .def_readonly("handed_on_seconds", &Tally::Sums::handed_on_seconds)
      .def_readonly("failed_handshakes", &Tally::Sums::failed_handshakes);
  py::class_<TlsContext, std::shared_ptr<TlsContext>>(module, "TlsContext")
      .def(py::init<std::string, std::string, std::string, bool>(), py::arg("certificate"), py::arg("key"),
           py::arg("client_ca") = "", py::arg("is_client_required") = false);
  py::class_<Fleet, std::shared_ptr<Fleet>>(module, "Fleet")
      .def(py::init<const std::vector<Fleet::PeerOf>&, const std::string&, int, std::string,
                    std::map<std::string, Fleet::BucketOf>, bool>(),
           py::arg("peers"), py::arg("table"), py::arg("me"), py::arg("authorization"), py::arg("buckets"),
           py::arg("tells_of_reads") = false)
      .def("owner", &Fleet::owner, py::arg("bucket"), py::arg("key"));
  py::class_<Front, std::shared_ptr<Front>>(module, "Front")
      .def(py::init<std::shared_ptr<Index>, std::shared_ptr<Files>, const FrontSettings&>(), py::arg("index"),
           py::arg("files"), py::arg("settings"))
      .def("listen", &Front::listen, py::arg("fd"))
      .def("start", &Front::start, release())
      .def("drain", &Front::drain, release())
      .def("stop", &Front::stop, release())
      .def("set_rules", &set_rules, py::arg("tokens"), py::arg("buckets"),
           py::arg("tenants") = std::map<std::string, double>(), py::arg("is_open") = false, py::arg("asks_back") = false,
           py::arg("blobs") = std::map<std::string, BucketOf>(), py::arg("certificates") = py::none())
      .def("change_tokens", &change_tokens, py::arg("added"), py::arg("removed"), py::arg("tenants"),
           py::arg("certificates") = NamesOf())
      .def("set_tls", [](Front& front, std::shared_ptr<TlsContext> tls) { front.set_tls(std::move(tls)); }, py::arg("tls"))
      .def("set_fleet", [](Front& front, std::shared_ptr<Fleet> fleet) { front.set_fleet(std::move(fleet)); },
           py::arg("fleet"))
      .def("charge", &Front::charge, py::arg("connection"), py::arg("tenant"))
      .def("set_blobs_until", &Front::set_blobs_until, py::arg("until_s"), py::arg("from_s"))
      .def("set_now", &Front::set_now, py::arg("now_s"))
      .def("fileno", &Front::event_fd)
      .def("take", &take, py::arg("limit"))
      .def(
          "say",
          [](Front& front, uint64_t connection, const py::buffer& bytes, bool is_data, bool is_last) {
            const py::buffer_info info = bytes.request();
            return front.say(connection, std::string(view_of(info)), is_data, is_last);
          },
          py::arg("connection"), py::arg("bytes"), py::arg("is_data") = false, py::arg("is_last") = false)
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
      .def("tally", &Front::tally)
      .def("tenant_figures", [](Front& front) {
        std::map<std::string, std::tuple<uint64_t, uint64_t, double>> said;
        for (const auto& [name, one] : front.tenant_figures()) said[name] = {one.hits, one.sent_bytes, one.throttled_s};
        return said;
      })
      .def("take_hits", [](Front& front) {
        std::map<uint16_t, std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>> hits;
        for (const auto& [bucket, one] : front.take_hits())
          hits[bucket] = {one.hits, one.hit_bytes, one.handed_on, one.handed_on_bytes};
        return hits;
      });
}
