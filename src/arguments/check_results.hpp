// A call's tensors as tables: what a result, or a part of one, has to be, and which tensors of a
// call may lie in the same memory.
#pragma once

#include <array>
#include <initializer_list>

#include "longspan/tensor.hpp"
#include "longspan/types.hpp"
#include "src/arguments/tensor_checks.hpp"

namespace longspan {

/// A result, or what is merged into one: of any float type; what is fp8 has a scale.
struct PartSpec {
  const Tensor& tensor;
  const char* name;
  const Tensor& scale;
  const char* scale_name;
  bool is_result = false;  // which is divided by its scale
};

/// Checks the type and the scale of a part, which has `scales` of them.
void check_part(const PartSpec& part, Device device, std::int64_t scales = 1);

/// Checks extents that a kernel counts in 32 bits, from dimension `first` on, of which there is at
/// least one.
void check_counts(const Tensor& t, const char* name, int first);

/// Checks factors [count]. On the host it looks at what they hold.
void check_factors(const Tensor& factors, const char* name, std::int64_t count, bool divides,
                   Device device);

/// What a call writes. It lies apart from all else, but may be one of `in_place` itself.
struct Written {
  const Tensor& tensor;
  const char* name;
  std::array<const Tensor*, 2> in_place = {};
};
/// What a call reads.
struct Read {
  const Tensor& tensor;
  const char* name;
};
/// Checks that what is written may be, and overlaps neither what is read nor each other. Tensors
/// that are not given overlap nothing.
void check_memory(std::initializer_list<Written> results, std::initializer_list<Read> inputs);

}  // namespace longspan
