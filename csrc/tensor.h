// Tensors behind torch's C interface: ownership, and what a plan needs to know of them.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "plan.h"
#include "torch_shim.h"

namespace relu2ir {

inline void check(AOTITorchError error, const char* what) {
  if (error) throw std::runtime_error(std::string("relu2ir: torch could not ") + what);
}

// Owns its handle.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  explicit Tensor(StableIValue value) : handle_(bit_cast<AtenTensorHandle>(value)) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }

  AtenTensorHandle release() {
    AtenTensorHandle handle = handle_;
    handle_ = nullptr;
    return handle;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
};

struct Placement {
  int32_t dtype, device_type, device_index;
  bool operator==(const Placement& other) const {
    return dtype == other.dtype && device_type == other.device_type && device_index == other.device_index;
  }
};

inline Placement placement_of(const Tensor& tensor) {
  Placement found;
  check(aoti_torch_get_dtype(tensor.get(), &found.dtype), "read a dtype");
  check(aoti_torch_get_device_type(tensor.get(), &found.device_type), "read a device");
  check(aoti_torch_get_device_index(tensor.get(), &found.device_index), "read a device");
  return found;
}

// Whether a plan can hold it: not if it is sparse, nested (it has no sizes to read) or of too many dimensions.
inline bool is_usual(const Tensor& tensor) {
  int64_t dims, *sizes;
  int32_t layout;
  return !aoti_torch_get_layout(tensor.get(), &layout) && layout == aoti_torch_layout_strided() &&
         !aoti_torch_get_dim(tensor.get(), &dims) && dims <= MAX_DIMS && !aoti_torch_get_sizes(tensor.get(), &sizes);
}

inline View view_of(const Tensor& tensor) {
  int64_t dims, *sizes, *strides;
  check(aoti_torch_get_dim(tensor.get(), &dims), "count dimensions");
  check(aoti_torch_get_sizes(tensor.get(), &sizes), "read sizes");
  check(aoti_torch_get_strides(tensor.get(), &strides), "read strides");
  if (dims > MAX_DIMS) {
    throw std::runtime_error("relu2ir: a tensor has " + std::to_string(dims) + " dimensions; at most 16 are supported");
  }
  View view;
  view.dims = static_cast<int>(dims);
  std::copy(sizes, sizes + dims, view.sizes);
  std::copy(strides, strides + dims, view.strides);
  return view;
}

inline Dtype element_type(int32_t dtype) {
  static const int32_t known[] = {aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float32(),
                                  aoti_torch_dtype_float64()};
  for (int i = 0; i < 4; ++i) {
    if (known[i] == dtype) return static_cast<Dtype>(i);
  }
  throw std::runtime_error("relu2ir: the kernels take float16, bfloat16, float32 and float64");
}

inline int64_t item_bytes(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

#if defined(__linux__)
constexpr uintptr_t HUGE_PAGE = 2 << 20;
constexpr int64_t HUGE_BYTES = 8 << 20;

// The first write to fresh memory costs a fault a page: 40 MB take 49 ms in pages of 4 KB, 5.5 ms in huge ones.
inline void ask_for_huge_pages(char* data, int64_t bytes) {
  if (bytes < HUGE_BYTES) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(HUGE_PAGE - 1);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish: without it nothing else changes
}
#endif

// A tensor of uninitialised elements with the sizes and strides of `view`, whose `data` it sets.
inline Tensor allocate(View& view, const Placement& at) {
  AtenTensorHandle handle;
  check(aoti_torch_empty_strided(view.dims, view.sizes, view.strides, at.dtype, at.device_type, at.device_index,
                                 &handle),
        "allocate a result");
  Tensor result(handle);
  void* data;
  check(torch_get_mutable_data_ptr(handle, &data), "reach a result's memory");
  view.data = static_cast<char*>(data);
#if defined(__linux__)
  if (at.device_type == aoti_torch_device_type_cpu()) {
    ask_for_huge_pages(view.data, count(view) * item_bytes(element_type(at.dtype)));
  }
#endif
  return result;
}

}  // namespace relu2ir
