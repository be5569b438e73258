// The eager front of an op: a builtin that answers the common call without a Python frame; see front.cpp.
#pragma once
#include "pyref.h"

namespace relu2ir {

// forget() drops what the fronts remember: the tables of choices changed.
PyObject* forget(PyObject* module, PyObject*);

// front(...) -> builtin.
PyObject* front(PyObject* module, PyObject* args);

}  // namespace relu2ir
