// Whether a call is plain eager execution: the questions of relu2ir/guards.py, without a Python frame.
#pragma once
#include "pyref.h"

namespace relu2ir {

struct Guard;

// guard(forward_ad's dictionary, (Tensor, Parameter, strided), (count of function modes, is_neg), dispatch keys of
// inference mode) -> builtin plain(*tensors) -> bool
PyObject* guard(PyObject*, PyObject* args);

// What such a builtin asks by; null with a Python error set when `callable` is something else.
const Guard* as_guard(PyObject* callable);

// Whether these operands meet plain execution; -1 on an error.
int plain(const Guard& guard, PyObject* const* args, Py_ssize_t count);

// Whether an operand is strided, neither sparse nor nested; -1 on an error.
int is_strided(const Guard& guard, PyObject* operand);

// torch's dispatch keys in this thread, or None where it hides them.
PyObject* dispatch_state(PyObject*, PyObject*);

}  // namespace relu2ir
