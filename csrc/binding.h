// From torch's boxed call to a plan: checks the tensors, makes the outputs, runs the op's entry point.
// A signature says how the op's tensors are laid out; signatures and entry points are generated.
#pragma once

#include <iterator>

#include "tensor.h"

namespace relu2ir {

// A result: its layout, and the input whose strides it takes (the input's own, or its first part's when plain).
struct Output {
  Layout layout;
  int like;
};

using BoxedKernel = void (*)(StableIValue* stack, uint64_t inputs, uint64_t outputs);

// One row of the generated table: an op (a forward or a gradient op) as torch knows it. `gpu` may be null.
struct Op {
  const char* name;
  const char* schema;
  int tensors, params, outputs;  // arguments and results; without results it writes its input
  BoxedKernel cpu, gpu, meta;
};

// What a forward op and its gradient op were built from.
struct Definition {
  const char* name;
  const char* hash;
};

// Runs `F` on the tensors of `stack`; `entry(plan, dtype, params, device index)` is called unless there is no element.
// Where no `results` are asked for, the first input is written in place: each element is read before it is written.
template <class F, class Signature, class Entry>
void run(StableIValue* stack, uint64_t results, Entry entry) {
  constexpr int INPUTS = std::size(Signature::inputs), OUTPUTS = std::size(Signature::outputs);
  Tensor inputs[INPUTS];
  for (int i = 0; i < INPUTS; ++i) inputs[i] = Tensor(stack[i]);
  double params[F::params + 1];
  for (int i = 0; i < F::params; ++i) params[i] = bit_cast<double>(stack[INPUTS + i]);

  const Placement placement = placement_of(inputs[0]);
  const Dtype dtype = element_type(placement.dtype);
  const int64_t bytes = item_bytes(dtype);
  View wholes[INPUTS], operands[F::inputs + F::outputs];
  int filled = 0;
  for (int i = 0; i < INPUTS; ++i) {
    if (!(placement_of(inputs[i]) == placement)) throw std::runtime_error("relu2ir: tensors differ in dtype or device");
    View& whole = wholes[i] = view_of(inputs[i]);
    const Layout layout = Signature::inputs[i];
    if (is_packed(layout) && (whole.dims == 0 || whole.sizes[whole.dims - 1] % 2 != 0)) {
      throw std::runtime_error("relu2ir: the last dimension of a packed tensor must be even");
    }
    const void* data;
    check(torch_get_const_data_ptr(inputs[i].get(), &data), "reach a tensor's memory");
    if (!data && count(whole) > 0) throw std::runtime_error("relu2ir: a tensor has no memory");
    whole.data = static_cast<char*>(const_cast<void*>(data));
    const View& first = operands[0];
    if (is_broadcast(layout)) {
      if (!is_broadcast_to(whole, layout, first)) {
        throw std::runtime_error("relu2ir: a vector has one element per column, a scalar one");
      }
      operands[filled++] = broadcast_to(whole, layout, first);
      continue;
    }
    for (int part = 0; part < parts_of(layout); ++part) operands[filled++] = part_of(whole, layout, part, bytes);
    const View& part = operands[filled - 1];
    if (part.dims != first.dims || !std::equal(first.sizes, first.sizes + first.dims, part.sizes)) {
      throw std::runtime_error("relu2ir: tensors differ in size");
    }
  }

  Tensor outputs[OUTPUTS];
  if (results == 0) operands[filled++] = operands[0];
  for (int i = 0; results > 0 && i < OUTPUTS; ++i) {
    const auto [layout, like] = Signature::outputs[i];
    const View& model = wholes[like];
    View result = layout == Layout::plain ? part_of(model, Signature::inputs[like], 0, bytes) : model;
    int64_t strides[MAX_DIMS];
    dense_strides(result, strides);
    std::copy(strides, strides + result.dims, result.strides);
    outputs[i] = allocate(result, placement);
    for (int part = 0; part < parts_of(layout); ++part) operands[filled++] = part_of(result, layout, part, bytes);
  }
  if (count(operands[0]) > 0) entry(plan_over<F>(operands, bytes), dtype, params, placement.device_index);
  for (int i = 0; results > 0 && i < OUTPUTS; ++i) stack[i] = bit_cast<StableIValue>(outputs[i].release());
}

template <class F, class Signature, auto entry>
void call_cpu(StableIValue* stack, uint64_t, uint64_t results) {
  run<F, Signature>(stack, results, [](const auto& plan, Dtype dtype, const double* params, int32_t) {
    entry(plan, dtype, params);
  });
}

// Makes `device` current while it lives, if it is not already.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    int32_t current;
    check(aoti_torch_get_current_device_index(&current), "tell the current device");
    if (current != device) check(aoti_torch_create_device_guard(device, &guard_), "change the device");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (guard_) aoti_torch_delete_device_guard(guard_);
  }

 private:
  DeviceGuardHandle guard_ = nullptr;
};

template <class F, class Signature, auto entry>
void call_gpu(StableIValue* stack, uint64_t, uint64_t results) {
  run<F, Signature>(stack, results, [](const auto& plan, Dtype dtype, const double* params, int32_t device) {
    const DeviceGuard guard(device);
    void* stream;
    check(aoti_torch_get_current_cuda_stream(device, &stream), "tell the current stream");
    entry(plan, dtype, params, stream);
  });
}

#ifdef RELU2IR_GPU
#define RELU2IR_GPU_KERNEL(kernel) kernel
#else
#define RELU2IR_GPU_KERNEL(kernel) nullptr
#endif

}  // namespace relu2ir
