// An op's kernel as a Python builtin, called without torch's dispatcher.
#pragma once
#include "binding.h"
#include "pyref.h"

namespace relu2ir {

// What such a builtin is made of. `to_pointer` and `from_pointer` are torch's own functions between a tensor object and
// an AtenTensorHandle in a capsule: the one makes a handle that we delete, the other only reads ours.
struct Direct {
  PyMethodDef method;
  const Op* op;
  BoxedKernel kernel;
  PyObject *to_pointer, *from_pointer;
};

constexpr int MAX_ARGUMENTS = 16;

// The builtin for `kernel` of `op`.
PyObject* direct(const Op& op, BoxedKernel kernel, PyObject* to_pointer, PyObject* from_pointer);

// What `callable` is made of, or null when it is something else.
const Direct* as_direct(PyObject* callable);

// Takes a tensor object's handle; false with a Python error set when it has none.
bool take_handle(const Direct& direct, PyObject* object, Tensor& tensor);

// Runs the kernel: on its inputs, which it consumes, and its params. Null with a Python error set when it throws.
PyObject* run(const Direct& direct, Tensor* tensors, const double* params);

}  // namespace relu2ir
