// The eager front of an op: a builtin that answers the common call without a Python frame.
#pragma once
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

namespace relu2ir {

// front(name, doc, arity, params, table, context, environment, probes, fallback) -> builtin; see front.cpp.
PyObject* front(PyObject* module, PyObject* args);

}  // namespace relu2ir
