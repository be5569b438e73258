#include "guard.h"

#include <dlfcn.h>

#include <cstdint>
#include <initializer_list>
#include <new>

namespace relu2ir {
namespace {

constexpr const char* NAME = "relu2ir.guard";

// torch's thread-local dispatch keys, as they differ from the default: two words, both 0 in plain execution. A
// torch.func transform, a TorchDispatchMode, autocast, torch.jit.trace and inference mode each set a bit, so one read
// answers what would take four calls (0.25 us). The name is C++'s and private: where it is missing, there is no builtin.
struct DispatchState {
  uint64_t included, excluded;
  bool operator==(const DispatchState& other) const {
    return included == other.included && excluded == other.excluded;
  }
};

const DispatchState* current_state() {
  static thread_local const auto* state =
      static_cast<const DispatchState*>(dlsym(RTLD_DEFAULT, "_ZN3c104impl26raw_local_dispatch_key_setE"));
  return state;
}

}  // namespace

// Made once per process, and kept for ever.
struct Guard {
  PyObject* forward_ad;  // the module dictionary that holds _current_level
  PyObject* tensor;      // torch.Tensor and torch.nn.Parameter, exactly
  PyObject* parameter;
  PyObject* function_modes;  // how many TorchFunctionModes are active
  PyObject* is_neg;          // of a tensor
  PyObject* strided;         // the layout torch.strided
  DispatchState accepted[8];  // states of plain execution beside the default: of inference mode, of a backward
  int count;
  PyObject *name_level, *name_layout, *name_is_nested;
};

static bool is_accepted(const Guard& guard, const DispatchState& state) {
  if (state == DispatchState{0, 0}) return true;
  for (int i = 0; i < guard.count; ++i) {
    if (state == guard.accepted[i]) return true;
  }
  return false;
}

int plain(const Guard& guard, PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(args[i]));
    if (type != guard.tensor && type != guard.parameter) return 0;
  }
  if (!is_accepted(guard, *current_state())) return 0;
  PyObject* level = PyDict_GetItemWithError(guard.forward_ad, guard.name_level);
  if (!level || PyLong_AsLong(level) >= 0) return 0;
  Ref modes(PyObject_CallNoArgs(guard.function_modes));
  if (!modes) return -1;
  if (PyLong_AsLong(modes.get()) != 0) return 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    Ref negative(PyObject_CallFunctionObjArgs(guard.is_neg, args[i], nullptr));
    if (negative.get() != Py_False) return negative ? 0 : -1;
  }
  return 1;
}

int is_strided(const Guard& guard, PyObject* operand) {
  Ref layout(PyObject_GetAttr(operand, guard.name_layout)), nested(PyObject_GetAttr(operand, guard.name_is_nested));
  return layout && nested ? layout.get() == guard.strided && nested.get() == Py_False : -1;
}

namespace {

PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Guard& guard = *static_cast<Guard*>(PyCapsule_GetPointer(self, NAME));
  int answer = plain(guard, args, count);
  for (Py_ssize_t i = 0; answer == 1 && i < count; i++) answer = is_strided(guard, args[i]);
  return answer == -1 ? nullptr : PyBool_FromLong(answer);
}

PyMethodDef METHOD = {"plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL,
                      "Whether a call on these tensors is plain eager execution."};

}  // namespace

PyObject* guard(PyObject*, PyObject* args) {
  Guard made{};
  if (!PyArg_ParseTuple(args, "O!(OOO)(OO)", &PyDict_Type, &made.forward_ad, &made.tensor, &made.parameter,
                        &made.strided, &made.function_modes, &made.is_neg)) {
    return nullptr;
  }
  made.name_level = PyUnicode_InternFromString("_current_level");
  made.name_layout = PyUnicode_InternFromString("layout");
  made.name_is_nested = PyUnicode_InternFromString("is_nested");
  Guard* kept = new (std::nothrow) Guard(made);
  if (!kept) return PyErr_NoMemory();
  for (PyObject* object : {kept->forward_ad, kept->tensor, kept->parameter, kept->function_modes, kept->is_neg, kept->strided}) {
    Py_INCREF(object);
  }
  Ref capsule(PyCapsule_New(kept, NAME, nullptr));
  return capsule ? PyCFunction_NewEx(&METHOD, capsule.get(), nullptr) : nullptr;
}

const Guard* as_guard(PyObject* callable) {
  PyObject* self = PyObject_TypeCheck(callable, &PyCFunction_Type) ? PyCFunction_GetSelf(callable) : nullptr;
  return static_cast<const Guard*>(PyCapsule_GetPointer(self, NAME));
}

PyObject* accept(PyObject*, PyObject* callable) {
  Guard* guard = const_cast<Guard*>(as_guard(callable));
  if (!guard) return nullptr;
  // The GIL is held: no other thread reads or writes.
  if (guard->count < 8 && !is_accepted(*guard, *current_state())) guard->accepted[guard->count++] = *current_state();
  Py_RETURN_NONE;
}

PyObject* sees_dispatch_state(PyObject*, PyObject*) { return PyBool_FromLong(current_state() != nullptr); }

}  // namespace relu2ir
