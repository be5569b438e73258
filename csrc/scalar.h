// Element types and their compute types: half types are computed in float, float and double in themselves.
// Stores round once, to nearest even; NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIP__)
#include "gpu.h"
#define RELU2IR_HD __host__ __device__ __forceinline__
#else
#define RELU2IR_HD inline
#endif

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace relu2ir {

enum class Dtype { float16, bfloat16, float32, float64 };

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class T>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeType<T>::type;

template <class To, class From>
RELU2IR_HD To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

RELU2IR_HD float load(float value) { return value; }
RELU2IR_HD double load(double value) { return value; }

// Selects, no branches: the host compiler vectorises them, and no operand is subnormal, so flush-to-zero changes nothing.
RELU2IR_HD float load(Half value) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(value.bits));
#else
  const uint32_t sign = (value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  const float subnormal = bit_cast<float>((113u << 23) | (rest << 13)) - bit_cast<float>(113u << 23);
  const uint32_t normal = (rest << 13) + (rest < 0x7c00u ? 112u << 23 : 224u << 23);
  return bit_cast<float>(sign | (rest < 0x400u ? bit_cast<uint32_t>(subnormal) : normal));
#endif
}

RELU2IR_HD float load(BFloat16 value) { return bit_cast<float>(uint32_t{value.bits} << 16); }

template <class T>
RELU2IR_HD T store(Compute<T> value) {
  return value;
}

template <>
RELU2IR_HD Half store<Half>(float value) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(value))};
#else
  const uint32_t bits = bit_cast<uint32_t>(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  // The unit in the last place of 0.5f is the smallest half, so the addition rounds a subnormal result.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - (126u << 23);
  const uint32_t normal = (rest + 0xfffu + ((rest >> 13) & 1u) - (112u << 23)) >> 13;
  const uint32_t finite = rest < (113u << 23) ? subnormal : normal;
  const uint32_t not_nan = rest < 0x477ff000u ? finite : 0x7c00u;  // from 65520 on, the nearest half is infinity
  return {static_cast<uint16_t>(sign | (rest > 0x7f800000u ? 0x7e00u : not_nan))};
#endif
}

template <>
RELU2IR_HD BFloat16 store<BFloat16>(float value) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
#endif
}

// Calls `body(T{})` with the element type of `dtype`.
template <class Body>
void with_element(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::float16: return body(Half{});
    case Dtype::bfloat16: return body(BFloat16{});
    case Dtype::float32: return body(float{});
    case Dtype::float64: return body(double{});
  }
}

}  // namespace relu2ir
