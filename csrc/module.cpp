// The module of a binary: relu2ir._C holds the library's ops, each that `relu2ir build` makes those of a user's file.
// What it registers with torch: <namespace>_cpp::<op>.kernel runs on CPU tensors, <namespace>_cuda::<op>.kernel on CUDA
// (or, through HIP, ROCm) tensors. It does so op by op, as a user's next binary may hold an op again.
#include <cstring>

#include "bindings.h"
#include "direct.h"
#include "front.h"
#include "guard.h"

namespace relu2ir {

#ifdef RELU2IR_GPU
constexpr const char* GPU = RELU2IR_GPU;
#else
constexpr const char* GPU = "";
#endif

void register_op(const Op& op, const std::string& provider, BoxedKernel kernel, const char* key) {
  const std::string name = std::string(table::NAMESPACE) + "_" + provider;
  // torch keeps what was registered as long as the handles live: for ever.
  TorchLibraryHandle fragment, real, fake;
  check(aoti_torch_library_init_fragment(name.c_str(), __FILE__, __LINE__, &fragment), "open a library");
  check(aoti_torch_library_init_impl(name.c_str(), key, __FILE__, __LINE__, &real), "open a library");
  check(aoti_torch_library_init_impl(name.c_str(), "Meta", __FILE__, __LINE__, &fake), "open a library");
  check(aoti_torch_library_def(fragment, op.schema), "define an op");
  check(torch_library_impl(real, op.name, kernel, TORCH_SHIM_VERSION), "register a kernel");
  check(torch_library_impl(fake, op.name, op.meta, TORCH_SHIM_VERSION), "register a kernel");
}

// The op whose kernel is asked for and the kernel, null when this binary has none.
struct Asked {
  const Op* op = nullptr;
  BoxedKernel kernel = nullptr;
};

Asked asked(const char* name, const char* provider) {
  const std::string qualified = std::string(name) + ".kernel";
  for (const Op* op : table::OPS) {
    if (op->name == qualified) return {op, std::strcmp(provider, "cuda") == 0 ? op->gpu : op->cpu};
  }
  return {};
}

// register_op(op, provider) -> whether this binary has such a kernel.
PyObject* register_op(PyObject*, PyObject* args) {
  const char *name, *provider;
  if (!PyArg_ParseTuple(args, "ss", &name, &provider)) return nullptr;
  const auto [op, kernel] = asked(name, provider);
  if (!kernel) Py_RETURN_FALSE;
  try {
    register_op(*op, provider, kernel, kernel == op->gpu ? "CUDA" : "CPU");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_TRUE;
}

PyObject* definitions(PyObject*, PyObject*) {
  PyObject* found = PyDict_New();
  for (const Definition& definition : table::DEFINITIONS) {
    PyObject* hash = found ? PyUnicode_FromString(definition.hash) : nullptr;
    const bool set = hash && PyDict_SetItemString(found, definition.name, hash) == 0;
    Py_XDECREF(hash);
    if (!set) {
      Py_XDECREF(found);
      return nullptr;
    }
  }
  return found;
}

PyObject* gpu(PyObject*, PyObject*) { return PyUnicode_FromString(GPU); }

// kernel(op, provider, to_pointer, from_pointer) -> builtin, or None when this binary has no such kernel.
PyObject* kernel(PyObject*, PyObject* args) {
  const char *name, *provider;
  PyObject *to_pointer, *from_pointer;
  if (!PyArg_ParseTuple(args, "ssOO", &name, &provider, &to_pointer, &from_pointer)) return nullptr;
  const auto [op, kernel] = asked(name, provider);
  if (kernel) return direct(*op, kernel, to_pointer, from_pointer);
  Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"definitions", definitions, METH_NOARGS, "The hash of each op's definition, by the op's qualified name."},
    {"gpu", gpu, METH_NOARGS, "'cuda', 'hip' or '': what the GPU kernels were compiled with."},
    {"register_op", register_op, METH_VARARGS, "Make torch know an op's kernel."},
    {"kernel", kernel, METH_VARARGS, "An op's kernel without torch's dispatcher."},
    {"front", front, METH_VARARGS, "The builtin that answers an op's common call."},
    {"guard", guard, METH_VARARGS, "The builtin that tells plain eager execution."},
    {"accept", accept, METH_O, "Take torch's dispatch keys of this moment for plain execution too."},
    {"forget", forget, METH_NOARGS, "Drop what the fronts remember."},
    {"sees_dispatch_state", sees_dispatch_state, METH_NOARGS, "Whether this torch shows its dispatch keys."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "relu2ir._C", "The compiled kernels.", -1, METHODS};

}  // namespace relu2ir

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&relu2ir::MODULE); }
