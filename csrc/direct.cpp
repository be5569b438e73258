// An op's kernel as a Python builtin, called without torch's dispatcher: 1.1 us against 1.7 (16 floats on a CPU).
// Only plain eager execution may call it: relu2ir/guards.py says when that is.
#include "direct.h"

#include <new>
#include <string>

namespace relu2ir {
namespace {

// The name of the capsule that holds a `Direct`. A kernel of another binary counts too, where it was built from the same
// csrc/, whose hash this is: the struct is the same.
constexpr const char* NAME = "relu2ir.direct." RELU2IR_SOURCES;

PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Direct& direct = *static_cast<Direct*>(PyCapsule_GetPointer(self, NAME));
  const Op& op = *direct.op;
  if (count != op.tensors + op.params) {
    return PyErr_Format(PyExc_TypeError, "%s takes %d tensors and %d numbers; found %zd arguments", op.name, op.tensors,
                        op.params, count);
  }
  Tensor tensors[MAX_ARGUMENTS];
  double params[MAX_ARGUMENTS];
  for (int i = 0; i < op.tensors; ++i) {
    if (!take_handle(direct, args[i], tensors[i])) return nullptr;
  }
  for (int i = 0; i < op.params; ++i) {
    params[i] = PyFloat_AsDouble(args[op.tensors + i]);
    if (params[i] == -1.0 && PyErr_Occurred()) return nullptr;
  }
  return run(direct, tensors, params);
}

}  // namespace

PyObject* direct(const Op& op, BoxedKernel kernel, PyObject* to_pointer, PyObject* from_pointer) {
  if (op.tensors + op.params > MAX_ARGUMENTS) Py_RETURN_NONE;
  // Made once per op and provider, and kept as long as the op: for ever.
  Direct* made = new (std::nothrow) Direct{{}, &op, kernel, to_pointer, from_pointer};
  if (!made) return PyErr_NoMemory();
  Py_INCREF(to_pointer);
  Py_INCREF(from_pointer);
  const auto function = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call));
  made->method = PyMethodDef{op.name, function, METH_FASTCALL, "An op's kernel: no gradient, plain tensors only."};
  Ref capsule(PyCapsule_New(made, NAME, nullptr));
  return capsule ? PyCFunction_NewEx(&made->method, capsule.get(), nullptr) : nullptr;
}

const Direct* as_direct(PyObject* callable) {
  PyObject* self = PyObject_TypeCheck(callable, &PyCFunction_Type) ? PyCFunction_GetSelf(callable) : nullptr;
  return PyCapsule_IsValid(self, NAME) ? static_cast<Direct*>(PyCapsule_GetPointer(self, NAME)) : nullptr;
}

bool take_handle(const Direct& direct, PyObject* object, Tensor& tensor) {
  Ref pointer(PyObject_CallFunctionObjArgs(direct.to_pointer, object, nullptr));
  if (pointer) tensor = Tensor(static_cast<AtenTensorHandle>(PyCapsule_GetPointer(pointer.get(), nullptr)));
  return tensor.get() != nullptr;
}

PyObject* run(const Direct& direct, Tensor* tensors, const double* params) {
  const Op& op = *direct.op;
  StableIValue stack[MAX_ARGUMENTS];
  for (int i = 0; i < op.tensors; ++i) stack[i] = bit_cast<StableIValue>(tensors[i].release());
  for (int i = 0; i < op.params; ++i) stack[op.tensors + i] = bit_cast<StableIValue>(params[i]);
  std::string problem;
  PyThreadState* state = PyEval_SaveThread();
  try {
    direct.kernel(stack, op.tensors + op.params, op.outputs);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  PyEval_RestoreThread(state);
  if (!problem.empty()) {
    PyErr_SetString(PyExc_RuntimeError, problem.c_str());
    return nullptr;
  }
  if (op.outputs == 0) Py_RETURN_NONE;
  Ref results(op.outputs > 1 ? PyTuple_New(op.outputs) : nullptr);
  for (int i = 0; i < op.outputs; ++i) tensors[i] = Tensor(stack[i]);
  for (int i = 0; i < op.outputs; ++i) {
    // from_pointer copies what it is said to steal (torch 2.10 to 2.14), so the handle stays ours to delete.
    Ref pointer(PyCapsule_New(tensors[i].get(), nullptr, nullptr));
    PyObject* result = pointer ? PyObject_CallFunctionObjArgs(direct.from_pointer, pointer.get(), nullptr) : nullptr;
    if (!result) return nullptr;
    if (op.outputs == 1) return result;
    PyTuple_SetItem(results.get(), i, result);
  }
  return results.release();
}

}  // namespace relu2ir
