// Whether a call is plain eager execution: the questions of relu2ir/guards.py, without a Python frame.
#pragma once
#include "pyref.h"

namespace relu2ir {

struct Guard;

// guard(forward_ad's dictionary, (Tensor, Parameter, strided), (count of function modes, is_neg)) -> builtin
// plain(*tensors) -> bool
PyObject* guard(PyObject*, PyObject* args);

// accept(plain): torch's dispatch keys of this moment are those of plain execution too.
PyObject* accept(PyObject*, PyObject* plain);

// What such a builtin asks by; null with a Python error set when `callable` is something else.
const Guard* as_guard(PyObject* callable);

// Whether these operands meet plain execution; -1 on an error.
int plain(const Guard& guard, PyObject* const* args, Py_ssize_t count);

// Whether an operand is strided, neither sparse nor nested; -1 on an error.
int is_strided(const Guard& guard, PyObject* operand);

// sees_dispatch_state() -> whether this torch shows its dispatch keys.
PyObject* sees_dispatch_state(PyObject*, PyObject*);

}  // namespace relu2ir
