// The part of torch's C interface that relu2ir calls, declared by hand so that no torch is needed to build.
// Every name exists since torch 2.10. tests/test_csrc.py compares each declaration with the headers of an installed torch.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__GNUC__)
#define RELU2IR_WEAK __attribute__((weak))
#else
#define RELU2IR_WEAK
#endif

extern "C" {

// torch/csrc/inductor/aoti_torch/c/macros.h
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using AOTITorchError = int32_t;

// torch/csrc/inductor/aoti_torch/c/shim.h: constants
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_layout_strided();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();

// torch/csrc/inductor/aoti_torch/c/shim.h: tensors; sizes and strides are borrowed
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle orig_handle, AtenTensorHandle* new_handle);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* ret_dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** ret_sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** ret_strides);
AOTITorchError aoti_torch_get_layout(AtenTensorHandle tensor, int32_t* ret_layout);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* ret_dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* ret_device_type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* ret_device_index);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes_ptr, const int64_t* strides_ptr,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* ret_new_tensor);

// torch/csrc/inductor/aoti_torch/c/shim.h: registration
using StableIValue = uint64_t;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
AOTITorchError aoti_torch_library_init_fragment(const char* ns, const char* file, uint32_t line,
                                                TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* k, const char* file, uint32_t line,
                                            TorchLibraryHandle* ret_new_torch_lib);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle self, const char* schema);

// torch/csrc/inductor/aoti_torch/c/shim.h: devices
struct DeviceGuardOpaque;
using DeviceGuardHandle = DeviceGuardOpaque*;
AOTITorchError aoti_torch_get_current_device_index(int32_t* ret_device_index);
AOTITorchError aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* ret_guard);
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard);

// torch/csrc/inductor/aoti_torch/c/shim.h: the one symbol of libtorch_cuda.so. Weak, because Python loads with RTLD_NOW
// and a CPU-only torch does not have it: there it is null, and the same binary loads.
RELU2IR_WEAK AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

// torch/csrc/stable/c/shim.h
using ParallelFunc = void (*)(int64_t begin, int64_t end, void* ctx);
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
AOTITorchError torch_call_dispatcher(const char* opName, const char* overloadName, StableIValue* stack,
                                     uint64_t extension_build_version);
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name,
                                  void (*fn)(StableIValue*, uint64_t, uint64_t), uint64_t extension_build_version);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** ret_data_ptr);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** ret_data_ptr);
AOTITorchError torch_list_get_item(StableListHandle list_handle, size_t index, StableIValue* element);
AOTITorchError torch_delete_list(StableListHandle list_handle);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc func, void* ctx);
}

// torch/csrc/stable/version.h: the interface that this file speaks, TORCH_VERSION_2_10_0.
constexpr uint64_t TORCH_SHIM_VERSION = (uint64_t{2} << 56) | (uint64_t{10} << 48);
