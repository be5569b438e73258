// The Meta kernel, which fake tensors run: results without memory, with the real results' sizes and strides (but for
// dimensions of size 1 and empty tensors, where torch's own empty_like differs between fake and real tensors).
// It goes through the dispatcher, because sizes may be symbolic.
#pragma once

#include "binding.h"

namespace relu2ir {

// Owned by whoever it is given to: a boxed call takes its arguments.
inline StableIValue share(const Tensor& tensor) {
  AtenTensorHandle handle;
  check(aoti_torch_new_tensor_handle(tensor.get(), &handle), "share a tensor");
  return bit_cast<StableIValue>(handle);
}

inline StableIValue first_part(StableIValue tensor, Layout layout) {
  if (layout == Layout::halves) {
    StableIValue chunk[] = {tensor, 2, static_cast<StableIValue>(-1)};  // self, chunks, dim
    check(torch_call_dispatcher("aten::chunk", "", chunk, TORCH_SHIM_VERSION), "split a fake tensor");
    const auto halves = bit_cast<StableListHandle>(chunk[0]);
    StableIValue first, second;
    check(torch_list_get_item(halves, 0, &first), "read a list");
    check(torch_list_get_item(halves, 1, &second), "read a list");
    check(torch_delete_list(halves), "delete a list");
    Tensor unused(second);  // every item was handed over
    return first;
  }
  if (layout == Layout::pairs) {
    const StableIValue none = 0;
    StableIValue slice[] = {tensor, static_cast<StableIValue>(-1), none, none, 2};  // self, dim, start, end, step
    check(torch_call_dispatcher("aten::slice", "Tensor", slice, TORCH_SHIM_VERSION), "slice a fake tensor");
    return slice[0];
  }
  return tensor;
}

inline StableIValue empty_like(StableIValue tensor) {
  StableIValue stack[6] = {tensor};  // and dtype, layout, device, pin_memory, memory_format: none
  check(torch_call_dispatcher("aten::empty_like", "", stack, TORCH_SHIM_VERSION), "make a fake result");
  return stack[0];
}

template <class Signature>
void call_meta(StableIValue* stack, uint64_t, uint64_t results) {
  constexpr int INPUTS = std::size(Signature::inputs), OUTPUTS = std::size(Signature::outputs);
  Tensor inputs[INPUTS];
  for (int i = 0; i < INPUTS; ++i) inputs[i] = Tensor(stack[i]);
  for (int i = 0; results > 0 && i < OUTPUTS; ++i) {
    const auto [layout, like] = Signature::outputs[i];
    const StableIValue model = share(inputs[like]);
    stack[i] = empty_like(layout == Layout::plain ? first_part(model, Signature::inputs[like]) : model);
  }
}

}  // namespace relu2ir
