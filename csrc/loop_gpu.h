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
constexpr int64_t GPU_MAX_GRID_X = 2147483647, GPU_MAX_GRID_Y = 65535;

template <class F>
struct Params {
  double values[F::params > 0 ? F::params : 1];
};

template <class F>
struct Pointers {
  char* data[F::inputs + F::outputs];
};

template <class T, int V>
struct alignas(V * sizeof(T)) Vector {
  T values[V];
};

template <class F, class T>
__device__ __forceinline__ void run_element(T* const (&at)[F::inputs + F::outputs], const Params<F>& params) {
  Compute<T> in[F::inputs], out[F::outputs];
#pragma unroll
  for (int k = 0; k < F::inputs; ++k) in[k] = load(*at[k]);
  F::apply(in, out, params.values);
#pragma unroll
  for (int k = 0; k < F::outputs; ++k) *at[F::inputs + k] = store<T>(out[k]);
}

template <class F, class T, int V>
__device__ __forceinline__ void run_vector(T* const (&at)[F::inputs + F::outputs], const Params<F>& params) {
  Vector<T, V> loaded[F::inputs], stored[F::outputs];
#pragma unroll
  for (int k = 0; k < F::inputs; ++k) loaded[k] = *reinterpret_cast<const Vector<T, V>*>(at[k]);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    Compute<T> in[F::inputs], out[F::outputs];
#pragma unroll
    for (int k = 0; k < F::inputs; ++k) in[k] = load(loaded[k].values[j]);
    F::apply(in, out, params.values);
#pragma unroll
    for (int k = 0; k < F::outputs; ++k) stored[k].values[j] = store<T>(out[k]);
  }
#pragma unroll
  for (int k = 0; k < F::outputs; ++k) *reinterpret_cast<Vector<T, V>*>(at[F::inputs + k]) = stored[k];
}

// Thread t takes the elements from t * V on; the last thread takes what is left one by one.
template <class F, class T>
__global__ void __launch_bounds__(GPU_THREADS) flat(Pointers<F> pointers, int64_t count, Params<F> params) {
  constexpr int V = VECTOR_BYTES / sizeof(T), N = F::inputs + F::outputs;
  const int64_t first = (int64_t{blockIdx.x} * GPU_THREADS + threadIdx.x) * V;
  T* at[N];
#pragma unroll
  for (int k = 0; k < N; ++k) at[k] = reinterpret_cast<T*>(pointers.data[k]) + first;
  if (first + V <= count) {
    run_vector<F, T, V>(at, params);
  } else {
    for (int64_t i = first; i < count; ++i) {
      run_element<F, T>(at, params);
#pragma unroll
      for (int k = 0; k < N; ++k) ++at[k];
    }
  }
}

// Rows on grid.x, which holds 2^31 blocks; columns on threadIdx.x and grid.y, which stops at 65,535 and so is stepped.
template <class F, class T, int V>
__global__ void __launch_bounds__(GPU_THREADS) rows(Plan<F::inputs + F::outputs> plan, Params<F> params) {
  constexpr int N = F::inputs + F::outputs;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, columns = plan.columns();
  if (row >= plan.rows()) return;
  int64_t offsets[N];
  if (row <= 0xffffffffLL) {
    plan.row_offsets(static_cast<uint32_t>(row), offsets);
  } else {
    plan.row_offsets(row, offsets);
  }
  const int64_t step = int64_t{gridDim.y} * blockDim.x * V;
  for (int64_t first = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * V; first < columns; first += step) {
    T* at[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int64_t stride = V > 1 ? 1 : plan.strides[k][plan.dims - 1];
      at[k] = reinterpret_cast<T*>(plan.data[k]) + offsets[k] + first * stride;
    }
    if (V == 1) {
      run_element<F, T>(at, params);
    } else if (first + V <= columns) {
      run_vector<F, T, V>(at, params);
    } else {
      for (int64_t i = first; i < columns; ++i) {
        run_element<F, T>(at, params);
#pragma unroll
        for (int k = 0; k < N; ++k) ++at[k];
      }
    }
  }
}

template <class F, class T, int V>
void launch_rows(const Plan<F::inputs + F::outputs>& plan, const Params<F>& params, gpuStream_t stream) {
  const int64_t vectors = (plan.columns() + V - 1) / V;
  int width = 1;  // threads along a row: few columns leave room for more rows in a block
  while (width < GPU_THREADS && width < vectors) width *= 2;
  const dim3 block(width, GPU_THREADS / width);
  const int64_t down = (plan.rows() + block.y - 1) / block.y;
  if (down > GPU_MAX_GRID_X) throw std::runtime_error("relu2ir: more rows than a GPU grid holds; split the tensor");
  const dim3 grid(down, std::min((vectors + width - 1) / width, GPU_MAX_GRID_Y));
  rows<F, T, V><<<grid, block, 0, stream>>>(plan, params);
}

template <class F, class T>
void launch(const Plan<F::inputs + F::outputs>& plan, const Params<F>& params, gpuStream_t stream) {
  constexpr int V = VECTOR_BYTES / sizeof(T);
  const int64_t blocks = (plan.columns() + GPU_THREADS * V - 1) / (GPU_THREADS * V);
  if (plan.flat() && plan.aligned && blocks <= GPU_MAX_GRID_X) {
    Pointers<F> pointers;
    std::copy(std::begin(plan.data), std::end(plan.data), pointers.data);
    flat<F, T><<<dim3(blocks), GPU_THREADS, 0, stream>>>(pointers, plan.columns(), params);
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
