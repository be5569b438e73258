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
__device__ __forceinline__ uint4 gpuLoadVector(const uint4* at) { return *at; }
__device__ __forceinline__ float gpuInverse(float x) { return __builtin_amdgcn_rcpf(x); }
__device__ __forceinline__ float gpuExp2(float x) { return exp2f(x); }
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
__device__ __forceinline__ uint4 gpuLoadVector(const uint4* at) {  // it breaks loads as well
  uint4 vector;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
               : "l"(at)
               : "memory");
  return vector;
}
// 2 ulp off; a subnormal result is kept.
__device__ __forceinline__ float gpuExp2(float x) {
  float power;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
// 1 ulp off, of a normal number whose inverse is one. __fdividef asks of each whether it is, by a branch.
__device__ __forceinline__ float gpuInverse(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}
#endif
