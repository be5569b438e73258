// The module relu2ir._C: importing it registers the raw ops with torch.
// relu2ir_cpp::<op>.kernel runs on CPU tensors, relu2ir_cuda::<op>.kernel on CUDA (or, through HIP, ROCm) tensors.
#include <cstring>

#include "bindings.h"
#include "direct.h"
#include "front.h"

namespace relu2ir {

#ifdef RELU2IR_GPU
constexpr const char* GPU = RELU2IR_GPU;
#else
constexpr const char* GPU = "";
#endif

// torch keeps what was registered as long as the handles live: for ever.
void register_ops(const char* name, const char* key, BoxedKernel Op::*kernel) {
  TorchLibraryHandle fragment, real, fake;
  check(aoti_torch_library_init_fragment(name, __FILE__, __LINE__, &fragment), "open a library");
  check(aoti_torch_library_init_impl(name, key, __FILE__, __LINE__, &real), "open a library");
  check(aoti_torch_library_init_impl(name, "Meta", __FILE__, __LINE__, &fake), "open a library");
  for (const Op& op : OPS) {
    check(aoti_torch_library_def(fragment, op.schema), "define an op");
    check(torch_library_impl(real, op.name, op.*kernel, TORCH_SHIM_VERSION), "register a kernel");
    check(torch_library_impl(fake, op.name, op.meta, TORCH_SHIM_VERSION), "register a kernel");
  }
}

PyObject* definitions(PyObject*, PyObject*) {
  PyObject* found = PyDict_New();
  for (const Definition& definition : DEFINITIONS) {
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
  const std::string qualified = std::string(name) + ".kernel";
  for (const Op& op : OPS) {
    const BoxedKernel found = std::strcmp(provider, "cuda") == 0 ? op.gpu : op.cpu;
    if (found && op.name == qualified) return direct(op, found, to_pointer, from_pointer);
  }
  Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"definitions", definitions, METH_NOARGS, "The hash of each op's definition, by the op's name."},
    {"gpu", gpu, METH_NOARGS, "'cuda', 'hip' or '': what the GPU kernels were compiled with."},
    {"kernel", kernel, METH_VARARGS, "An op's kernel without torch's dispatcher."},
    {"front", front, METH_VARARGS, "The builtin that answers an op's common call."},
    {"forget", forget, METH_NOARGS, "Drop what the fronts remember."},
    {"dispatch_state", dispatch_state, METH_NOARGS, "torch's dispatch keys in this thread, or None."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "relu2ir._C", "The compiled kernels.", -1, METHODS};

}  // namespace relu2ir

PyMODINIT_FUNC PyInit__C() {
  try {
    relu2ir::register_ops("relu2ir_cpp", "CPU", &relu2ir::Op::cpu);
    if (*relu2ir::GPU) relu2ir::register_ops("relu2ir_cuda", "CUDA", &relu2ir::Op::gpu);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ImportError, error.what());
    return nullptr;
  }
  return PyModule_Create(&relu2ir::MODULE);
}
