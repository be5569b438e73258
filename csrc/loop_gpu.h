// The loop of the `cuda` provider: a functor over any plan, for CUDA and HIP. No torch header comes in here.
// Measured on an H200: one 16-byte vector per thread in a flat grid of 256-thread blocks runs at the speed of a copy at
// every size; more vectors per thread, streaming hints and a capped grid all lost, and so did a 64-bit division per
// vector (14 %).
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "elementary.h"
#include "gpu.h"
#include "plan.h"

namespace relu2ir {

constexpr int GPU_THREADS = 256;
constexpr int GPU_ITEMS = 8;  // elements of a thread that reads one by one, where vectors do not fit
constexpr int64_t GPU_MAX_BLOCKS = 2147483647, GPU_MAX_DOWN = 65535;  // of the grid's first axis and of the others

template <class F>
struct Params {
  double values[F::params > 0 ? F::params : 1];
};

template <class F>
struct Pointers {
  char* data[F::inputs + F::outputs];
};

// The functions in which an op computes on elements of T.
template <class T>
using Functions = Elementary<false, sizeof(T) == 2>;

// How rows are read: in vectors that begin on their boundaries, in vectors that begin anywhere, or one by one.
enum class Access { aligned, anywhere, single };

// From one column to the next, in elements, where columns follow each other: see Plan::unit.
template <class F>
__device__ constexpr int64_t step(int operand) {
  return F::uniform(operand) ? 0 : F::paired(operand) || (operand > 0 && F::paired(operand - 1)) ? 2 : 1;
}

// Elements in turn, a0 b0 a1 b1 ..., in two vectors: all of a, then all of b; and back.
template <class T, int V>
__device__ __forceinline__ void split(T (&low)[V], T (&high)[V]) {
  T a[V], b[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    a[j] = 2 * j < V ? low[2 * j % V] : high[2 * j % V];
    b[j] = 2 * j < V ? low[(2 * j + 1) % V] : high[(2 * j + 1) % V];
  }
#pragma unroll
  for (int j = 0; j < V; ++j) low[j] = a[j], high[j] = b[j];
}

template <class T, int V>
__device__ __forceinline__ void join(T (&a)[V], T (&b)[V]) {
  T low[V], high[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    low[j] = j % 2 ? b[j / 2] : a[j / 2];
    high[j] = j % 2 ? b[(V + j) / 2] : a[(V + j) / 2];
  }
#pragma unroll
  for (int j = 0; j < V; ++j) a[j] = low[j], b[j] = high[j];
}

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
  F::template apply<Functions<T>>(in, out, params.values);
#pragma unroll
  for (int k = 0; k < F::outputs; ++k) *at[F::inputs + k] = store<T>(out[k]);
}

// VECTOR_BYTES from any element on: two aligned vectors, of which each holds some of them, shifted together. Read one by
// one such elements took 2.4 times as long.
template <class T>
__device__ __forceinline__ uint4 load_vector(const T* at, bool aligned) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(at), bytes = aligned ? 0 : address % VECTOR_BYTES;
  const uint4* from = reinterpret_cast<const uint4*>(address - bytes);
  const uint4 low = gpuLoadVector(from);
  if (bytes == 0) return low;
  const uint4 high = gpuLoadVector(from + 1);  // it holds one of the elements at least
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = bytes & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = bytes & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint64_t both = uint64_t{words[i + 1]} << 32 | words[i];
    words[i] = static_cast<uint32_t>(both >> (bytes & 3) * 8);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Where the vector does not begin on its boundary, one by one: in pieces of 2 and 4 bytes it took 1.4 times as long, as
// the elements then lie on the stack.
template <class T>
__device__ __forceinline__ void store_vector(T* at, const T (&elements)[VECTOR_BYTES / sizeof(T)], bool aligned) {
  if (aligned || reinterpret_cast<uintptr_t>(at) % VECTOR_BYTES == 0) {
    uint4 vector;
    memcpy(&vector, elements, VECTOR_BYTES);
    gpuStoreVector(reinterpret_cast<uint4*>(at), vector);
  } else {
#pragma unroll
    for (int j = 0; j < VECTOR_BYTES / static_cast<int>(sizeof(T)); ++j) at[j] = elements[j];
  }
}

// As many elements of each operand as a vector holds, which follow each other. Of a pair's parts, which lie in turn, two
// vectors hold as many.
template <class F, class T>
__device__ __forceinline__ void run_vector(T* const (&at)[F::inputs + F::outputs], Compute<T> (&in)[F::inputs],
                                           const Params<F>& params, bool aligned) {
  constexpr int V = VECTOR_BYTES / sizeof(T), N = F::inputs + F::outputs;
  T elements[N][V];
#pragma unroll
  for (int k = 0; k < F::inputs; ++k) {
    if (F::uniform(k) || (k > 0 && F::paired(k - 1))) continue;
    uint4 vector = load_vector(at[k], aligned);
    memcpy(elements[k], &vector, VECTOR_BYTES);
    if (!F::paired(k)) continue;
    vector = load_vector(at[k] + V, aligned);
    memcpy(elements[k + 1], &vector, VECTOR_BYTES);
    split(elements[k], elements[k + 1]);
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    Compute<T> out[F::outputs];
#pragma unroll
    for (int k = 0; k < F::inputs; ++k) {
      if (!F::uniform(k)) in[k] = load(elements[k][j]);
    }
    F::template apply<Functions<T>>(in, out, params.values);
#pragma unroll
    for (int k = 0; k < F::outputs; ++k) elements[F::inputs + k][j] = store<T>(out[k]);
  }
#pragma unroll
  for (int k = F::inputs; k < N; ++k) {
    if (F::paired(k - 1)) continue;
    if (F::paired(k)) join(elements[k], elements[k + 1]);
    store_vector(at[k], elements[k], aligned);
    if (F::paired(k)) store_vector(at[k] + V, elements[k + 1], aligned);
  }
}

// Columns [first, first + V) of a row, of which those before 0 and from `columns` on do not exist. `at` is where `first`
// would lie.
template <class F, class T>
__device__ __forceinline__ void run_columns(T* (&at)[F::inputs + F::outputs], Compute<T> (&in)[F::inputs],
                                            int64_t first, int64_t columns, const Params<F>& params, bool aligned) {
  constexpr int V = VECTOR_BYTES / sizeof(T);
  if (first >= 0 && first + V <= columns) {
    run_vector<F, T>(at, in, params, aligned);
    return;
  }
  for (int j = 0; j < V; ++j) {
    if (first + j >= 0 && first + j < columns) run_element<F, T>(at, in, params);
#pragma unroll
    for (int k = 0; k < F::inputs + F::outputs; ++k) at[k] += step<F>(k);
  }
}

// Thread t takes the elements from t * V on.
template <class F, class T>
__global__ void __launch_bounds__(GPU_THREADS) flat(Pointers<F> pointers, int64_t count, Params<F> params) {
  constexpr int V = VECTOR_BYTES / sizeof(T), N = F::inputs + F::outputs;
  const int64_t first = (int64_t{blockIdx.x} * GPU_THREADS + threadIdx.x) * V;
  T* at[N];
#pragma unroll
  for (int k = 0; k < N; ++k) at[k] = reinterpret_cast<T*>(pointers.data[k]) + first * step<F>(k);
  Compute<T> in[F::inputs];
  load_uniform<F, T>(at, in);
  run_columns<F, T>(at, in, first, count, params, true);
}

// A block takes `blockDim.y` rows; along each, every thread takes one vector, or GPU_ITEMS single elements `blockDim.x`
// apart. Blocks along a row are neighbours in the grid: with rows as neighbours memory is read in far jumps, 3 times
// slower at 4096 x 12288. The grid's other two axes count down, as one stops at 65,535. Where rows begin anywhere, the
// threads' vectors begin where the first output's do.
template <class F, class T, Access access>
__global__ void __launch_bounds__(GPU_THREADS)
    rows(RELU2IR_KERNEL_ARGUMENT Plan<F::inputs + F::outputs> plan, Params<F> params) {
  constexpr int V = VECTOR_BYTES / sizeof(T), N = F::inputs + F::outputs;
  const uint32_t down = blockIdx.z * gridDim.y + blockIdx.y, along = blockIdx.x;
  const int64_t row = int64_t{down} * blockDim.y + threadIdx.y;
  if (row >= plan.rows) return;
  int64_t offsets[N];
  if (plan.rows <= 0xffffffffLL) {
    plan.row_offsets(static_cast<uint32_t>(row), offsets);
  } else {
    plan.row_offsets(row, offsets);
  }
  T* at[N];
#pragma unroll
  for (int k = 0; k < N; ++k) at[k] = reinterpret_cast<T*>(plan.data[k]) + offsets[k];
  Compute<T> in[F::inputs];
  load_uniform<F, T>(at, in);
  if (access == Access::single) {
    int64_t column = int64_t{along} * blockDim.x * GPU_ITEMS + threadIdx.x, steps[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      steps[k] = F::uniform(k) ? 0 : plan.column_stride(k);
      at[k] += column * steps[k];
    }
#pragma unroll
    for (int i = 0; i < GPU_ITEMS; ++i, column += blockDim.x) {
      if (column < plan.columns) run_element<F, T>(at, in, params);
#pragma unroll
      for (int k = 0; k < N; ++k) at[k] += blockDim.x * steps[k];
    }
    return;
  }
  int64_t first = (int64_t{along} * blockDim.x + threadIdx.x) * V;
  if (access == Access::anywhere) {
    first -= reinterpret_cast<uintptr_t>(at[F::inputs]) / sizeof(T) / step<F>(F::inputs) % V;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) at[k] += first * step<F>(k);
  run_columns<F, T>(at, in, first, plan.columns, params, access == Access::aligned);
}

template <class F, class T, Access access>
void launch_rows(const Plan<F::inputs + F::outputs>& plan, const Params<F>& params, gpuStream_t stream) {
  constexpr int V = VECTOR_BYTES / sizeof(T);
  const int64_t per_thread = access == Access::single ? GPU_ITEMS : V;
  const int64_t columns = plan.columns + (access == Access::anywhere ? V - 1 : 0);
  const int64_t few = std::min<int64_t>(columns / (access == Access::single ? 1 : V), 32);
  const int64_t wanted = std::max((columns + per_thread - 1) / per_thread, few);
  int width = 1;  // threads along a row: few columns leave room for more rows in a block
  while (width < GPU_THREADS && width < wanted) width *= 2;
  const dim3 block(width, GPU_THREADS / width);
  const int64_t along = (columns + width * per_thread - 1) / (width * per_thread);
  const int64_t down = (plan.rows + block.y - 1) / block.y, folds = (down + GPU_MAX_DOWN - 1) / GPU_MAX_DOWN;
  if (along > GPU_MAX_BLOCKS || folds > GPU_MAX_DOWN) {
    throw std::runtime_error("relu2ir: a GPU grid cannot hold the tensor; split it");
  }
  const dim3 grid(along, (down + folds - 1) / folds, folds);
  rows<F, T, access><<<grid, block, 0, stream>>>(plan, params);
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
    launch_rows<F, T, Access::aligned>(plan, params, stream);
  } else if (plan.unit) {
    launch_rows<F, T, Access::anywhere>(plan, params, stream);
  } else {
    launch_rows<F, T, Access::single>(plan, params, stream);
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
