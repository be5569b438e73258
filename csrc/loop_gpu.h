// The loop of the `cuda` provider: a functor over any plan, for CUDA and HIP. No torch header comes in here.
// Measured on an H200: one 16-byte vector per thread in a flat grid of 256-thread blocks runs at the speed of a copy at
// every size; more vectors per thread, streaming hints and a capped grid all lost, and so did a 64-bit division per
// vector (14 %).
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gpu.h"
#include "plan.h"

namespace relu2ir {

constexpr int GPU_THREADS = 256;
constexpr int GPU_ITEMS = 8;  // elements of a thread that reads one by one, where vectors do not fit
constexpr int64_t GPU_MAX_BLOCKS = 2147483647;

template <class F>
struct Params {
  double values[F::params > 0 ? F::params : 1];
};

template <class F>
struct Pointers {
  char* data[F::inputs + F::outputs];
};

// What a thread reads once: the uniform inputs. The other values of `in` are for each element.
template <class F, class T>
__device__ __forceinline__ void load_uniform(T* const (&at)[F::inputs + F::outputs], Compute<T> (&in)[F::inputs]) {
#pragma unroll
  for (int k = 0; k < F::inputs; ++k) {
    if (F::uniform(k)) in[k] = load(*at[k]);
  }
}

template <class F, class T>
__device__ __forceinline__ void run_element(T* const (&at)[F::inputs + F::outputs], Compute<T> (&in)[F::inputs],
                                            const Params<F>& params) {
  Compute<T> out[F::outputs];
#pragma unroll
  for (int k = 0; k < F::inputs; ++k) {
    if (!F::uniform(k)) in[k] = load(*at[k]);
  }
  F::apply(in, out, params.values);
#pragma unroll
  for (int k = 0; k < F::outputs; ++k) *at[F::inputs + k] = store<T>(out[k]);
}

// VECTOR_BYTES from each operand that is not uniform: these are aligned, and their strides are 1.
template <class F, class T>
__device__ __forceinline__ void run_vector(T* const (&at)[F::inputs + F::outputs], Compute<T> (&in)[F::inputs],
                                           const Params<F>& params) {
  constexpr int V = VECTOR_BYTES / sizeof(T);
  T loaded[F::inputs][V], stored[F::outputs][V];
#pragma unroll
  for (int k = 0; k < F::inputs; ++k) {
    if (F::uniform(k)) continue;
    const uint4 vector = *reinterpret_cast<const uint4*>(at[k]);
    memcpy(loaded[k], &vector, VECTOR_BYTES);
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    Compute<T> out[F::outputs];
#pragma unroll
    for (int k = 0; k < F::inputs; ++k) {
      if (!F::uniform(k)) in[k] = load(loaded[k][j]);
    }
    F::apply(in, out, params.values);
#pragma unroll
    for (int k = 0; k < F::outputs; ++k) stored[k][j] = store<T>(out[k]);
  }
#pragma unroll
  for (int k = 0; k < F::outputs; ++k) {
    uint4 vector;
    memcpy(&vector, stored[k], VECTOR_BYTES);
    gpuStoreVector(reinterpret_cast<uint4*>(at[F::inputs + k]), vector);
  }
}

// What a vector leaves over: `count` elements whose strides are all 1.
template <class F, class T>
__device__ __forceinline__ void run_tail(T* (&at)[F::inputs + F::outputs], Compute<T> (&in)[F::inputs], int64_t count,
                                         const Params<F>& params) {
  for (int64_t i = 0; i < count; ++i) {
    run_element<F, T>(at, in, params);
#pragma unroll
    for (int k = 0; k < F::inputs + F::outputs; ++k) ++at[k];
  }
}

// Thread t takes the elements from t * V on.
template <class F, class T>
__global__ void __launch_bounds__(GPU_THREADS) flat(Pointers<F> pointers, int64_t count, Params<F> params) {
  constexpr int V = VECTOR_BYTES / sizeof(T), N = F::inputs + F::outputs;
  const int64_t first = (int64_t{blockIdx.x} * GPU_THREADS + threadIdx.x) * V;
  T* at[N];
#pragma unroll
  for (int k = 0; k < N; ++k) at[k] = reinterpret_cast<T*>(pointers.data[k]) + (F::uniform(k) ? 0 : first);
  Compute<T> in[F::inputs];
  load_uniform<F, T>(at, in);
  if (first + V <= count) {
    run_vector<F, T>(at, in, params);
  } else {
    run_tail<F, T>(at, in, count - first, params);
  }
}

// A block takes `blockDim.y` rows; along each, every thread takes one vector, or GPU_ITEMS single elements `blockDim.x`
// apart. Blocks along a row are neighbours in the grid: with rows as neighbours memory is read in far jumps, 3 times
// slower at 4096 x 12288. One 32-bit division per thread places its block.
template <class F, class T, int V>
__global__ void __launch_bounds__(GPU_THREADS)
    rows(RELU2IR_KERNEL_ARGUMENT Plan<F::inputs + F::outputs> plan, uint32_t blocks_per_row, Params<F> params) {
  constexpr int N = F::inputs + F::outputs;
  const uint32_t down = blockIdx.x / blocks_per_row, along = blockIdx.x - down * blocks_per_row;
  const int64_t row = int64_t{down} * blockDim.y + threadIdx.y;
  if (row >= plan.rows) return;
  int64_t offsets[N];
  if (plan.rows <= 0xffffffffLL) {
    plan.row_offsets(static_cast<uint32_t>(row), offsets);
  } else {
    plan.row_offsets(row, offsets);
  }
  const int64_t first = int64_t{along} * blockDim.x * (V > 1 ? V : GPU_ITEMS) + threadIdx.x * V;
  T* at[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int64_t step = F::uniform(k) ? 0 : V > 1 ? 1 : plan.column_stride(k);
    at[k] = reinterpret_cast<T*>(plan.data[k]) + offsets[k] + first * step;
  }
  Compute<T> in[F::inputs];
  load_uniform<F, T>(at, in);
  if (V == 1) {
    int64_t steps[N];
#pragma unroll
    for (int k = 0; k < N; ++k) steps[k] = blockDim.x * plan.column_stride(k);
#pragma unroll
    for (int i = 0; i < GPU_ITEMS; ++i) {
      if (first + i * blockDim.x < plan.columns) run_element<F, T>(at, in, params);
#pragma unroll
      for (int k = 0; k < N; ++k) at[k] += steps[k];
    }
  } else if (first + V <= plan.columns) {
    run_vector<F, T>(at, in, params);
  } else {
    run_tail<F, T>(at, in, plan.columns - first, params);
  }
}

template <class F, class T, int V>
void launch_rows(const Plan<F::inputs + F::outputs>& plan, const Params<F>& params, gpuStream_t stream) {
  const int64_t per_thread = V > 1 ? V : GPU_ITEMS;
  const int64_t wanted = std::max((plan.columns + per_thread - 1) / per_thread, std::min<int64_t>(plan.columns / V, 32));
  int width = 1;  // threads along a row: few columns leave room for more rows in a block
  while (width < GPU_THREADS && width < wanted) width *= 2;
  const dim3 block(width, GPU_THREADS / width);
  const int64_t along = (plan.columns + width * per_thread - 1) / (width * per_thread);
  const int64_t blocks = (plan.rows + block.y - 1) / block.y * along;
  if (blocks > GPU_MAX_BLOCKS) throw std::runtime_error("relu2ir: a GPU grid cannot hold the tensor; split it");
  rows<F, T, V><<<dim3(blocks), block, 0, stream>>>(plan, static_cast<uint32_t>(along), params);
}

template <class F, class T>
void launch(const Plan<F::inputs + F::outputs>& plan, const Params<F>& params, gpuStream_t stream) {
  constexpr int V = VECTOR_BYTES / sizeof(T);
  const int64_t blocks = (plan.columns + GPU_THREADS * V - 1) / (GPU_THREADS * V);
  if (plan.flat() && plan.aligned && blocks <= GPU_MAX_BLOCKS) {
    Pointers<F> pointers;
    std::copy(std::begin(plan.data), std::end(plan.data), pointers.data);
    flat<F, T><<<dim3(blocks), GPU_THREADS, 0, stream>>>(pointers, plan.columns, params);
  } else if (plan.unit && plan.aligned) {
    launch_rows<F, T, V>(plan, params, stream);
  } else {
    launch_rows<F, T, 1>(plan, params, stream);
  }
}

template <class F>
void run_gpu(const Plan<F::inputs + F::outputs>& plan, Dtype dtype, const double* params, void* stream) {
  Params<F> values{};
  std::copy(params, params + F::params, values.values);
  with_element(dtype, [&](auto element) {
    launch<F, decltype(element)>(plan, values, static_cast<gpuStream_t>(stream));
  });
  const gpuError_t error = gpuGetLastError();
  if (error != gpuSuccess) {
    throw std::runtime_error(std::string("relu2ir: the kernel did not launch: ") + gpuGetErrorString(error));
  }
}

}  // namespace relu2ir
