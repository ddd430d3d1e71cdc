#include "module.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The native part of the cache: of its server, of mounts, and files as memory.";
  bind_device(module);
  bind_index(module);
  bind_front(module);
  bind_mapping(module);
  bind_reads(module);
  bind_writer(module);
}
