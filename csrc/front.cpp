// The eager front of an op: a builtin that answers the common call without a Python frame.
//
// It asks the questions of relu2ir/guards.py, finds the choice that relu2ir/eager.py made for (overrides, dtype,
// device), and calls its kernel. Whatever is not the common case (a keyword, a subclass, a transform, a mode, autocast,
// no choice yet) goes to the Python front, which is the rule; this is only its fast half.
#include "front.h"

#include <initializer_list>
#include <new>

#include "direct.h"
#include "guard.h"

namespace relu2ir {
namespace {

// The last choice that ran a kernel of this binary: its dtype and device are compared in C, not as Python objects.
struct Last {
  uint64_t generation = 0;
  PyObject* overrides = nullptr;  // compared, never followed
  Placement placement{};
  const Direct* kernel = nullptr;
  PyObject* recorded = nullptr;  // borrowed from the table
};

uint64_t generation = 1;

// What each front was made with. Ops are registered for the life of the process, and so are their fronts.
struct Front {
  PyMethodDef method;
  Py_ssize_t arity;
  PyObject* layouts;       // a Layout per operand, as a tuple of ints
  PyObject* params;        // the defaults of the op's params, a tuple of floats
  PyObject* table;         // {(overrides, dtype, device): (kernel, recorded)}
  PyObject* context;       // ContextVar.get of the overrides that use() sets
  PyObject* environment;   // the module dictionary that holds _environment
  PyObject* grad_enabled;  // whether gradients are recorded
  PyObject* fallback;
  const Guard* guard;
  double numbers[MAX_ARGUMENTS];
  Last last;
  PyObject *name_environment, *name_dtype, *name_device, *name_shape, *name_requires_grad;
};

// Whether a gradient must be recorded; -1 on an error.
int records(const Front& front, PyObject* const* args) {
  for (Py_ssize_t i = 0; i < front.arity; i++) {
    Ref needed(PyObject_GetAttr(args[i], front.name_requires_grad));
    if (!needed) return -1;
    if (needed.get() == Py_False) continue;
    Ref enabled(PyObject_CallNoArgs(front.grad_enabled));
    return enabled ? enabled.get() == Py_True : -1;
  }
  return 0;
}

// Reads the sizes of an operand; false when it has none (a nested tensor) or more than a kernel takes.
bool read_sizes(const Front& front, PyObject* operand, View& view) {
  Ref shape(PyObject_GetAttr(operand, front.name_shape));
  if (!shape) PyErr_Clear();
  const Py_ssize_t dims = shape ? PyTuple_Size(shape.get()) : -1;
  if (dims < 0 || dims > MAX_DIMS) return false;
  view.dims = static_cast<int>(dims);
  for (Py_ssize_t d = 0; d < dims; d++) view.sizes[d] = PyLong_AsLongLong(PyTuple_GetItem(shape.get(), d));
  return true;
}

// Whether the operands keep the op's contract and agree in dtype, device and logical sizes: only then was a choice made
// for them. -1 on an error.
int alike(const Front& front, PyObject* const* args) {
  for (PyObject* name : {front.name_dtype, front.name_device}) {
    if (front.arity == 1) break;
    Ref first(PyObject_GetAttr(args[0], name));
    if (!first) return -1;
    for (Py_ssize_t i = 1; i < front.arity; i++) {
      Ref other(PyObject_GetAttr(args[i], name));
      const int same = other ? PyObject_RichCompareBool(first.get(), other.get(), Py_EQ) : -1;
      if (same != 1) return same;
    }
  }
  View first;
  for (Py_ssize_t i = 0; i < front.arity; i++) {
    const auto layout = static_cast<Layout>(PyLong_AsLong(PyTuple_GetItem(front.layouts, i)));
    if (front.arity == 1 && layout == Layout::plain) return 1;
    View whole;
    if (!read_sizes(front, args[i], whole)) return 0;
    if (is_packed(layout) && (whole.dims == 0 || whole.sizes[whole.dims - 1] % 2 != 0)) return 0;
    if (is_broadcast(layout)) {
      if (!is_broadcast_to(whole, layout, first)) return 0;
      continue;
    }
    const View part = part_of(whole, layout, 0, 0);
    if (i == 0) first = part;
    if (part.dims != first.dims || !std::equal(first.sizes, first.sizes + first.dims, part.sizes)) return 0;
  }
  return 1;
}

// The overrides in force, borrowed; null on an error.
PyObject* overrides_of(const Front& front) {
  Ref asked(PyObject_CallNoArgs(front.context));
  if (!asked) return nullptr;
  // The context, or the module, keeps what is returned alive.
  return asked.get() == Py_None ? PyDict_GetItemWithError(front.environment, front.name_environment) : asked.get();
}

// The choice for these operands, borrowed from the table; null without an error when none was made yet.
PyObject* choice(const Front& front, PyObject* overrides, PyObject* const* args) {
  for (Py_ssize_t i = 0; i < front.arity; i++) {
    if (is_strided(*front.guard, args[i]) != 1) return nullptr;
  }
  Ref dtype(PyObject_GetAttr(args[0], front.name_dtype)), device(PyObject_GetAttr(args[0], front.name_device));
  if (!dtype || !device) return nullptr;
  Ref key(PyTuple_Pack(3, overrides, dtype.get(), device.get()));
  return key ? PyDict_GetItemWithError(front.table, key.get()) : nullptr;
}

PyObject* fall_back(const Front& front, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Ref positional(PyTuple_New(count));
  Ref keywords(names ? PyDict_New() : nullptr);
  if (!positional || (names && !keywords)) return nullptr;
  for (Py_ssize_t i = 0; i < count; i++) {
    Py_INCREF(args[i]);
    PyTuple_SetItem(positional.get(), i, args[i]);
  }
  for (Py_ssize_t i = 0; names && i < PyTuple_Size(names); i++) {
    if (PyDict_SetItem(keywords.get(), PyTuple_GetItem(names, i), args[count + i]) < 0) return nullptr;
  }
  return PyObject_Call(front.fallback, positional.get(), keywords.get());
}

// The chosen callable on the operands and the params' defaults.
PyObject* call_chosen(const Front& front, PyObject* callable, PyObject* const* args) {
  const Py_ssize_t params = PyTuple_Size(front.params);
  Ref operands(PyTuple_New(front.arity + params));
  if (!operands) return nullptr;
  for (Py_ssize_t i = 0; i < front.arity + params; i++) {
    PyObject* operand = i < front.arity ? args[i] : PyTuple_GetItem(front.params, i - front.arity);
    Py_INCREF(operand);
    PyTuple_SetItem(operands.get(), i, operand);
  }
  // The call may run Python code that drops the table's entry.
  Py_INCREF(callable);
  Ref held(callable);
  return PyObject_Call(callable, operands.get(), nullptr);
}

PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Front& front = *static_cast<Front*>(PyCapsule_GetPointer(self, nullptr));
  if (names || count != front.arity) return fall_back(front, args, count, names);
  int answer = plain(*front.guard, args, count);
  if (answer == 1) answer = alike(front, args);
  if (answer != 1) return answer ? nullptr : fall_back(front, args, count, nullptr);
  const int recorded = records(front, args);
  PyObject* overrides = recorded == -1 ? nullptr : overrides_of(front);
  if (!overrides) return nullptr;

  Last& last = front.last;
  if (last.overrides == overrides && last.generation == generation) {
    Tensor tensors[MAX_ARGUMENTS];
    bool usual = true;
    for (Py_ssize_t i = 0; i < count; i++) {
      if (!take_handle(*last.kernel, args[i], tensors[i])) return nullptr;
      usual = usual && is_usual(tensors[i]);
    }
    if (usual && placement_of(tensors[0]) == last.placement) {
      return recorded ? call_chosen(front, last.recorded, args) : run(*last.kernel, tensors, front.numbers);
    }
  }

  PyObject* chosen = choice(front, overrides, args);
  if (!chosen) return PyErr_Occurred() ? nullptr : fall_back(front, args, count, nullptr);
  if (const Direct* kernel = as_direct(PyTuple_GetItem(chosen, 0))) {
    Tensor first;
    if (!take_handle(*kernel, args[0], first)) return nullptr;
    if (!is_usual(first)) return fall_back(front, args, count, nullptr);
    last = Last{generation, overrides, placement_of(first), kernel, PyTuple_GetItem(chosen, 1)};
  }
  return call_chosen(front, PyTuple_GetItem(chosen, recorded), args);
}

}  // namespace

PyObject* forget(PyObject*, PyObject*) {
  ++generation;
  Py_RETURN_NONE;
}

PyObject* front(PyObject*, PyObject* args) {
  const char *name, *doc;
  PyObject* guard;
  Front made{};
  if (!PyArg_ParseTuple(args, "ssO!O!O!OO!OOO", &name, &doc, &PyTuple_Type, &made.layouts, &PyTuple_Type, &made.params,
                        &PyDict_Type, &made.table, &made.context, &PyDict_Type, &made.environment,
                        &made.grad_enabled, &made.fallback, &guard)) {
    return nullptr;
  }
  made.guard = as_guard(guard);
  if (!made.guard) return nullptr;
  made.arity = PyTuple_Size(made.layouts);
  for (Py_ssize_t i = 0; i < PyTuple_Size(made.params) && i < MAX_ARGUMENTS; i++) {
    made.numbers[i] = PyFloat_AsDouble(PyTuple_GetItem(made.params, i));
  }
  made.name_environment = PyUnicode_InternFromString("_environment");
  made.name_dtype = PyUnicode_InternFromString("dtype");
  made.name_device = PyUnicode_InternFromString("device");
  made.name_shape = PyUnicode_InternFromString("shape");
  made.name_requires_grad = PyUnicode_InternFromString("requires_grad");
  Front* kept = new (std::nothrow) Front(made);
  PyObject *kept_name = PyUnicode_FromString(name), *kept_doc = PyUnicode_FromString(doc);  // Python points into them
  if (!kept || !kept_name || !kept_doc) return PyErr_NoMemory();
  for (PyObject* object : {kept->layouts, kept->params, kept->table, kept->context, kept->environment,
                           kept->grad_enabled, kept->fallback, guard}) {
    Py_INCREF(object);
  }
  const auto function = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call));
  kept->method = PyMethodDef{PyUnicode_AsUTF8AndSize(kept_name, nullptr), function, METH_FASTCALL | METH_KEYWORDS,
                             PyUnicode_AsUTF8AndSize(kept_doc, nullptr)};
  Ref capsule(PyCapsule_New(kept, nullptr, nullptr));
  return capsule ? PyCFunction_NewEx(&kept->method, capsule.get(), nullptr) : nullptr;
}

}  // namespace relu2ir
