// One set of names for CUDA and HIP: all that the GPU loop needs of either.
#pragma once

#if defined(__HIP__) || defined(__HIP_PLATFORM_AMD__)
#include <hip/hip_runtime.h>
#define RELU2IR_KERNEL_ARGUMENT const
#define gpuStream_t hipStream_t
#define gpuError_t hipError_t
#define gpuSuccess hipSuccess
#define gpuGetLastError hipGetLastError
#define gpuGetErrorString hipGetErrorString
__device__ __forceinline__ void gpuStoreVector(uint4* at, uint4 vector) { *at = vector; }
#else
#include <cuda_runtime.h>
// Read in place: a plan is indexed by loop variables, and would be copied to each thread's stack.
#define RELU2IR_KERNEL_ARGUMENT const __grid_constant__
#define gpuStream_t cudaStream_t
#define gpuError_t cudaError_t
#define gpuSuccess cudaSuccess
#define gpuGetLastError cudaGetLastError
#define gpuGetErrorString cudaGetErrorString
// As an instruction of its own: nvcc 13.0 breaks an assignment into four stores, 3 times slower on slices.
__device__ __forceinline__ void gpuStoreVector(uint4* at, uint4 vector) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(vector.x), "r"(vector.y), "r"(vector.z),
               "r"(vector.w)
               : "memory");
}
#endif
