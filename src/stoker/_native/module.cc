#include "module.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The native part of the cache server.";
  bind_index(module);
  bind_front(module);
}
