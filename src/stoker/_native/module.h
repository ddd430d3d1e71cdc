// Shared by the files that bind the native part to Python.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace stoker {}

namespace py = pybind11;
using namespace stoker;
using release = py::call_guard<py::gil_scoped_release>;

void bind_device(py::module_& module);
void bind_index(py::module_& module);
void bind_front(py::module_& module);
void bind_mapping(py::module_& module);
void bind_reads(py::module_& module);
void bind_writer(py::module_& module);
