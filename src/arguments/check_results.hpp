// Tables of a call's tensors: the requirements on a result or a part of one, and which tensors of a
// call may share memory.
#pragma once

#include <array>
#include <initializer_list>

#include "longspan/tensor.hpp"
#include "longspan/types.hpp"
#include "src/arguments/tensor_checks.hpp"

namespace longspan {

/// A result, or a part that is merged into one: of any float type; fp8 needs a scale.
struct PartSpec {
  const Tensor& tensor;
  const char* name;
  const Tensor& scale;
  const char* scale_name;
  bool is_result = false;  // it is divided by its scale
};

/// Checks the type of a part and its scales, `scales` in number.
void check_part(const PartSpec& part, Device device, std::int64_t scales = 1);

/// Checks the extents that a kernel counts in 32 bits, from dimension `first` on (at least one).
void check_counts(const Tensor& t, const char* name, int first);

/// Checks scales [count]; on the host also their values.
void check_factors(const Tensor& factors, const char* name, std::int64_t count, bool divides,
                   Device device);

/// A tensor that a call writes. It overlaps no other, but may be one of `in_place` itself.
struct Written {
  const Tensor& tensor;
  const char* name;
  std::array<const Tensor*, 2> in_place = {};
};
/// A tensor that a call reads.
struct Read {
  const Tensor& tensor;
  const char* name;
};
/// Checks that results may be written, and overlap neither inputs nor each other. Tensors that are
/// not given overlap nothing.
void check_memory(std::initializer_list<Written> results, std::initializer_list<Read> inputs);

}  // namespace longspan
