#include "src/arguments/check_results.hpp"

#include <algorithm>

#include "longspan/storage.hpp"
#include "src/arguments/array_checks.hpp"

namespace longspan {

void check_part(const PartSpec& part, Device device, std::int64_t scales) {
  const Tensor& t = part.tensor;
  require(is_float(t.dtype), "{} is {}; fp32, fp16, bf16 or fp8 is wanted", part.name,
          name(t.dtype));
  require(!storage_of(t.dtype).needs_scale || part.scale,
          "{} is {} and there is no {}; give it (1 where none is due)", part.name, name(t.dtype),
          part.scale_name);
  check_factors(part.scale, part.scale_name, scales, part.is_result, device);
}

void check_counts(const Tensor& t, const char* name, int first) {
  for (int d = first; d < t.dims; ++d)
    require(t.shape[d] >= 1 && t.shape[d] <= kMostCount,
            "{} is {}: dimension {} has {} elements; 1 to 2^31 - 1 are possible", name,
            shape_text(t), d, t.shape[d]);
}

void check_factors(const Tensor& factors, const char* name, std::int64_t count, bool divides,
                   Device device) {
  const float* values = array_of<float>(factors, name, count, device);
  if (device == Device::host)
    check_scales(ScaleView::dense(values, count), name, 1, static_cast<int>(count), divides);
}

void check_memory(std::initializer_list<Written> results, std::initializer_list<Read> inputs) {
  for (const Written* result = results.begin(); result != results.end(); ++result) {
    if (!result->tensor) continue;
    check_written(result->tensor, result->name);
    const auto& in_place = result->in_place;
    for (const Read& in : inputs)
      check_overlap(result->tensor, result->name, in.tensor, in.name,
                    std::find(in_place.begin(), in_place.end(), &in.tensor) != in_place.end());
    for (const Written* other = results.begin(); other != result; ++other)
      check_overlap(result->tensor, result->name, other->tensor, other->name);
  }
}

}  // namespace longspan
