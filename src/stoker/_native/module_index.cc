// What Python sees of the index. No call waits for anything with the interpreter's lock held.
#include "module.h"

#include "index.h"

namespace {

py::bytes id_of(const Hash128& id) { return {reinterpret_cast<const char*>(&id), sizeof id}; }

Hash128 id_from(std::string_view bytes) {
  Hash128 id;
  if (bytes.size() != sizeof id) throw py::value_error("an object's identity has 16 bytes");
  std::memcpy(&id, bytes.data(), sizeof id);
  return id;
}

py::object opt_block(uint32_t block) { return block == WHOLE ? py::object(py::none()) : py::int_(block); }
uint32_t block_from(std::optional<uint32_t> block) { return block.value_or(WHOLE); }

void bind_records(py::module_& module) {
  py::class_<Found>(module, "Found")
      .def_readonly("version", &Found::version)
      .def_readonly("attributes", &Found::attributes)
      .def_property_readonly("size_bytes", [](const Found& f) { return f.object.size_bytes; })
      .def_property_readonly("checked_s", [](const Found& f) { return f.object.checked_s; })
      .def_property_readonly("used_s", [](const Found& f) { return f.object.used_s; })
      .def_property_readonly("container", [](const Found& f) { return f.object.container; })
      .def_property_readonly("offset", [](const Found& f) { return f.object.offset; })
      .def_property_readonly("crc", [](const Found& f) { return f.object.crc; })
      .def_property_readonly("tag", [](const Found& f) { return f.object.tag; })
      .def_property_readonly("is_absent", [](const Found& f) { return (f.object.flags & Object::ABSENT) != 0; })
      .def_property_readonly("is_large", [](const Found& f) { return (f.object.flags & Object::LARGE) != 0; })
      .def_property_readonly("is_verified", [](const Found& f) { return (f.object.flags & Object::VERIFIED) != 0; })
      .def("block", [](const Found& f, size_t block) -> std::optional<std::pair<uint32_t, bool>> {
        if (block >= f.blocks.size() || !(f.blocks[block].flags & Block::HELD)) return std::nullopt;
        return std::pair(f.blocks[block].crc, (f.blocks[block].flags & Block::VERIFIED) != 0);
      });
  py::class_<Piece>(module, "Piece")
      .def(py::init([](uint16_t bucket, py::bytes id, std::optional<uint32_t> block, uint32_t container) {
             return Piece{bucket, id_from(std::string_view(id)), block_from(block), container};
           }),
           py::arg("bucket"), py::arg("id"), py::arg("block"), py::arg("container"))
      .def_readonly("bucket", &Piece::bucket)
      .def_property_readonly("id", [](const Piece& p) { return id_of(p.id); })
      .def_property_readonly("block", [](const Piece& p) { return opt_block(p.block); })
      .def_readonly("container", &Piece::container)
      .def_readonly("used_s", &Piece::used_s)
      .def_readonly("size_bytes", &Piece::size_bytes)
      .def_readonly("offset", &Piece::offset)
      .def_readonly("crc", &Piece::crc)
      .def_readonly("is_verified", &Piece::is_verified);
  py::class_<Container>(module, "Container")
      .def_readonly("bucket", &Container::bucket)
      .def_readonly("is_large", &Container::is_large)
      .def_readonly("pieces", &Container::pieces)
      .def_readonly("size_bytes", &Container::size_bytes)
      .def_readonly("used_s", &Container::used_s);
  py::class_<BucketFigures>(module, "BucketFigures")
      .def_readonly("objects", &BucketFigures::objects)
      .def_readonly("pieces", &BucketFigures::pieces)
      .def_readonly("size_bytes", &BucketFigures::size_bytes);
  py::class_<Replay>(module, "Replay")
      .def_readonly("records", &Replay::records)
      .def_readonly("damaged_bytes", &Replay::damaged_bytes)
      .def_readonly("was_torn", &Replay::was_torn);
  py::class_<Survey>(module, "Survey")
      .def_readonly("unknown", &Survey::unknown)
      .def_readonly("missing", &Survey::missing)
      .def_readonly("too_long", &Survey::too_long)
      .def_readonly("segments", &Survey::segments)
      .def_readonly("large_bytes", &Survey::large_bytes);
  py::class_<Name>(module, "Name")
      .def_readonly("key", &Name::key)
      .def_readonly("version", &Name::version)
      .def_property_readonly("id", [](const Name& n) { return id_of(n.object.id); })
      .def_property_readonly("size_bytes", [](const Name& n) { return n.object.size_bytes; })
      .def_property_readonly("checked_s", [](const Name& n) { return n.object.checked_s; })
      .def_property_readonly("used_s", [](const Name& n) { return n.object.used_s; })
      .def_property_readonly("container", [](const Name& n) { return n.object.container; })
      .def_property_readonly("is_absent", [](const Name& n) { return (n.object.flags & Object::ABSENT) != 0; });
}

}  // namespace

void bind_index(py::module_& module) {
  module.def(
      "crc32c",
      [](const py::buffer& data) {
        const py::buffer_info info = data.request();
        if (info.ndim != 1 || (info.size && info.strides[0] != info.itemsize))
          throw py::value_error("only bytes that lie one after the other have a checksum");
        const auto size = static_cast<size_t>(info.size * info.itemsize);
        const py::gil_scoped_release unlocked;
        return crc32c(info.ptr, size);
      },
      py::arg("data"));
  static py::exception<FileProblem> file_problem(module, "FileProblem", PyExc_OSError);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const FileProblem& problem) {
      PyErr_SetObject(file_problem.ptr(), py::make_tuple(problem.number, problem.what()).ptr());
    }
  });
  bind_records(module);
  py::class_<Index, std::shared_ptr<Index>>(module, "Index")
      .def(py::init<const std::string&, uint32_t, uint32_t>(), py::arg("path"), py::arg("block_size_bytes"),
           py::arg("now_s") = UINT32_MAX, release())
      .def_property_readonly("is_of_later", &Index::is_of_later)
      .def_property_readonly("replay", &Index::replay)
      .def("file_bytes", &Index::file_bytes, release())
      .def("memory_bytes", &Index::memory_bytes, release())
      .def("__len__", &Index::objects)
      .def("bucket", &Index::bucket, py::arg("name"), py::arg("note"), release())
      .def("buckets", &Index::buckets)
      .def("find", &Index::find, py::arg("bucket"), py::arg("key"), py::arg("with_blocks") = false, release())
      .def("held", &Index::held, py::arg("bucket"), py::arg("key"), py::arg("tag"), py::arg("block"), py::arg("now_s"),
           release())
      .def("learn", &Index::learn, py::arg("bucket"), py::arg("key"), py::arg("version"), py::arg("size_bytes"),
           py::arg("absent"), py::arg("now_s"), py::arg("attributes") = "",
           py::arg("stays_true") = false, release())
      .def("forget", &Index::forget, py::arg("bucket"), py::arg("key"), release())
      .def("forget_absent", &Index::forget_absent, py::arg("before_s"), release())
      .def("refresh", &Index::refresh, py::arg("bucket"), py::arg("prefix"), release())
      .def("clear", &Index::clear, py::arg("bucket"), release())
      .def(
          "hold",
          [](Index& index, uint16_t bucket, std::string_view key, std::string_view version,
             std::optional<uint32_t> block, uint32_t container, uint32_t offset, uint32_t crc, uint32_t now_s) {
            return index.hold(bucket, key, version, block_from(block), container, offset, crc, now_s);
          },
          py::arg("bucket"), py::arg("key"), py::arg("version"), py::arg("block"), py::arg("container"),
          py::arg("offset"), py::arg("crc"), py::arg("now_s"), release())
      .def(
          "verified",
          [](Index& index, uint16_t bucket, std::string_view key, std::optional<uint32_t> block, uint32_t container) {
            return index.verified(bucket, key, block_from(block), container);
          },
          py::arg("bucket"), py::arg("key"), py::arg("block"), py::arg("container"), release())
      .def("lose", &Index::lose, py::arg("piece"), release())
      .def("move", &Index::move, py::arg("piece"), py::arg("container"), py::arg("offset"), release())
      .def("lose_container", &Index::lose_container, py::arg("container"), release())
      .def(
          "lose_containers",
          [](Index& index, const std::vector<uint32_t>& containers) {
            index.lose_containers({containers.begin(), containers.end()});
          },
          py::arg("containers"), release())
      .def(
          "use",
          [](Index& index, uint16_t bucket, std::string_view key, std::optional<uint32_t> block, uint32_t now_s) {
            index.use(bucket, key, block_from(block), now_s);
          },
          py::arg("bucket"), py::arg("key"), py::arg("block"), py::arg("now_s"), release())
      .def("containers", &Index::containers, release())
      .def("container", &Index::container, py::arg("number"))
      .def("doubt", &Index::doubt, py::arg("container"), release())
      .def("key_of", &Index::key_of, py::arg("piece"), release())
      .def(
          "ids",
          [](const Index& index, uint16_t bucket, const std::vector<std::string>& keys) {
            std::string ids;
            {
              const py::gil_scoped_release unlocked;
              ids = index.ids(bucket, keys);
            }
            return py::bytes(ids);
          },
          py::arg("bucket"), py::arg("keys"))
      .def("lacking", &Index::lacking, py::arg("bucket"), py::arg("keys"), py::arg("checked_from_s"), release())
      .def("container_max", &Index::container_max)
      .def(
          "pieces",
          [](const Index& index, uint32_t container, bool with_keys) {
            std::vector<NamedPiece> found;
            {
              const py::gil_scoped_release unlocked;
              found = index.pieces(container, with_keys);
            }
            std::vector<std::pair<Piece, std::string>> pieces;
            for (NamedPiece& one : found) pieces.emplace_back(one.piece, std::move(one.key));
            return pieces;
          },
          py::arg("container"), py::arg("with_keys") = false)
      .def("container_keys", &Index::container_keys, release())
      .def("figures", &Index::figures, release())
      .def(
          "sample",
          [](const Index& index, size_t count, const std::vector<uint16_t>& buckets, std::optional<bool> large,
             uint64_t seed) {
            const Packing packing = large ? (*large ? Packing::large : Packing::packed) : Packing::any;
            return index.sample(count, {buckets.begin(), buckets.end()}, packing, seed);
          },
          py::arg("count"), py::arg("buckets"), py::arg("is_large"), py::arg("seed"), release())
      .def(
          "sample_ids",
          [](const Index& index, const std::vector<uint32_t>& segments, size_t count, uint64_t seed) {
            std::unordered_map<uint32_t, std::vector<Hash128>> drawn;
            {
              const py::gil_scoped_release unlocked;
              drawn = index.sample_ids(segments, count, seed);
            }
            py::dict ids;
            for (const auto& [segment, some] : drawn)
              ids[py::int_(segment)] = py::bytes(reinterpret_cast<const char*>(some.data()), some.size() * sizeof(Hash128));
            return ids;
          },
          py::arg("segments"), py::arg("count"), py::arg("seed"))
      .def(
          "scan",
          [](const Index& index, uint16_t bucket, std::string_view prefix, uint64_t cursor, size_t limit) {
            auto names = index.scan(bucket, prefix, cursor, limit);
            return std::pair(std::move(names), cursor);
          },
          py::arg("bucket"), py::arg("prefix"), py::arg("cursor"), py::arg("limit"), release())
      .def("survey", &Index::survey, py::arg("folder"), release())
      .def("compact", &Index::compact, py::arg("anyway") = false, release())
      .def("sync", &Index::sync, release());
}
